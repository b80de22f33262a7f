"""Floors as rows: below every way, for every weighted sum of columns."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.menu import Affine, KeptFloor, LayerFloor, PricedFloor
from stage_dp.floor_rows import floor_rows

SAMPLES, COUNT = 4, 8


def floor_of(ways, prices, again, held):
    """Return the floor of ways [n, 3]: seconds, step seconds, state; and of kinds of
    recomputation."""
    seconds, step, state = ways.T
    return LayerFloor(
        seconds=Affine(0.0, seconds.min() / SAMPLES),
        step_seconds=step.min(),
        state_bytes=state.min(),
        priced=tuple(
            PricedFloor(
                price=price, step_seconds=float((COUNT * seconds + step + price * state).min())
            )
            for price in prices
        ),
        kept=tuple(
            KeptFloor(seconds=Affine(more), activation_bytes=Affine(0.0, bytes))
            for more, bytes in zip(again, held, strict=True)
        ),
    )


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_way_has_a_lower_weighted_sum_than_the_rows_of_its_floor(seed):
    rng = np.random.default_rng(seed)
    ways = rng.uniform(0, [1, 5, 9], size=(rng.integers(1, 6), 3)).round(int(rng.integers(0, 3)))
    prices = rng.uniform(0, 4, size=rng.integers(0, 5))
    again, held = np.array([0.0, 0.3]), np.array([1.0, 0.2])
    rows = floor_rows((floor_of(ways, prices, again, held),), SAMPLES, COUNT)
    every = np.array(
        [
            (t + more, u, state, SAMPLES * bytes)
            for t, u, state in ways
            for more, bytes in zip(again, held, strict=True)
        ]
    )
    for weights in rng.uniform(0, 3, size=(20, 4)) * rng.integers(0, 2, size=(20, 4)):
        assert (rows @ weights).min() <= (every @ weights).min() * (1 + 1e-9) + 1e-9


def test_prices_at_the_corners_of_the_ways_leave_nothing_out():
    # B t + u of 8, 4 and 2 with 1, 2 and 4 bytes: corners tie at prices 4 and 1.
    ways = np.array([[1.0, 0.0, 1.0], [0.5, 0.0, 2.0], [0.25, 0.0, 4.0]])
    rows = floor_rows((floor_of(ways, (0.0, 1.0, 4.0, 99.0), [0.0], [0.0]),), SAMPLES, COUNT)
    work = COUNT * rows[:, 0] + rows[:, 1]
    for price in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        best = min(8 * t + price * state for t, _, state in ways)
        assert (work + price * rows[:, 2]).min() == np.float64(best)
