"""Floors as rows: below every way, for every weighted sum of columns."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.menu import Affine, KeptFloor, LayerFloor, PricedFloor
from stage_dp.floor_rows import floor_rows

SAMPLES, COUNT = 4, 8
NOTHING_KEPT = [(0.0,) * 6]


def floor_of(ways, prices, kinds, shares=None):
    """Return the floor of ways [n, 3]: seconds, step seconds, state; with shares of the step
    seconds beside prices; and of kinds of recomputation [m, 5]: seconds, kept, temporaries, more
    seconds and bytes of a split backward."""
    seconds, step, state = ways.T
    return LayerFloor(
        seconds=Affine(0.0, seconds.min() / SAMPLES),
        step_seconds=step.min(),
        state_bytes=state.min(),
        priced=tuple(
            PricedFloor(
                price=price,
                step_share=share,
                step_seconds=float((COUNT * seconds + share * step + price * state).min()),
            )
            for price, share in zip(prices, shares or [1.0] * len(prices), strict=True)
        ),
        kept=tuple(
            KeptFloor(
                seconds=Affine(more),
                activation_bytes=Affine(0.0, bytes),
                transient_bytes=Affine(working),
                split_seconds=Affine(split),
                delayed_bytes=Affine(delayed),
                waiting_bytes=Affine(waiting),
            )
            for more, bytes, working, split, delayed, waiting in kinds
        ),
    )


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_way_has_a_lower_weighted_sum_than_the_rows_of_its_floor(seed):
    rng = np.random.default_rng(seed)
    ways = rng.uniform(0, [1, 5, 9], size=(rng.integers(1, 6), 3)).round(int(rng.integers(0, 3)))
    prices = rng.uniform(0, 4, size=rng.integers(0, 5))
    shares = rng.choice([0.0, 0.1, 1.0, 2.0], size=len(prices)).tolist()
    kinds = np.array([[0.0, 1.0, 0.5, 0.1, 0.2, 0.9], [0.3, 0.2, 0.7, 0.4, 0.6, 0.5]])
    rows = floor_rows((floor_of(ways, prices, kinds, shares),), SAMPLES, COUNT)
    every = np.array(
        [
            (t + more, u, state, SAMPLES * bytes, *rest)
            for t, u, state in ways
            for more, bytes, *rest in kinds
        ]
    )
    for weights in rng.uniform(0, 3, size=(20, 8)) * rng.integers(0, 2, size=(20, 8)):
        assert (rows @ weights).min() <= (every @ weights).min() * (1 + 1e-9) + 1e-9


def test_rows_of_a_floor_keep_what_it_says():
    rng = np.random.default_rng(0)
    ways = rng.uniform(0.1, [1, 5, 9], size=(4, 3))
    prices, shares = (0.0, 0.4, 2.0, 0.0), [1.0, 0.1, 0.1, 0.1]
    floor = floor_of(ways, prices, NOTHING_KEPT, shares)
    rows = floor_rows((floor,), SAMPLES, COUNT)
    assert (rows[:, 0] >= floor.seconds.value(SAMPLES) * (1 - 1e-9)).all()
    assert (rows[:, 1] >= floor.step_seconds * (1 - 1e-9)).all()
    for one in floor.priced:
        sums = COUNT * rows[:, 0] + one.step_share * rows[:, 1] + one.price * rows[:, 2]
        assert sums.min() >= one.step_seconds * (1 - 1e-7)


def test_prices_at_the_corners_of_the_ways_leave_nothing_out():
    # B t + u of 8, 4 and 2 with 1, 2 and 4 bytes: corners tie at prices 4 and 1.
    ways = np.array([[1.0, 0.0, 1.0], [0.5, 0.0, 2.0], [0.25, 0.0, 4.0]])
    rows = floor_rows((floor_of(ways, (0.0, 1.0, 4.0, 99.0), NOTHING_KEPT),), SAMPLES, COUNT)
    work = COUNT * rows[:, 0] + rows[:, 1]
    for price in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        best = min(8 * t + price * state for t, _, state in ways)
        assert (work + price * rows[:, 2]).min() == np.float64(best)
