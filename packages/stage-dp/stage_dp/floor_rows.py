"""Floors of a menu as rows at one microbatch count, of which mixtures in any proportion are bounds.

With B microbatches every way to run a layer has t >= t0, u >= u0, state >= s0 and, for prices p_j,

    B t + u + p_j state >= v_j

(-> LayerFloor). Over the state, the least B t + u is then a falling convex line with corners; each
corner (s, w) stands for the two ends of what t and u may be there: t = t0 and u = w - B t0, or
u = u0 and t = (w - u0) / B. What bounds use of rows are least weighted sums of their columns, so
corners are all they need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from alpa_interchange.menu import KeptFloor, LayerFloor
from stage_dp.menu_table import Array

FLOOR_COLUMNS = 4  # forward plus backward, step seconds, state, activations
NOTHING_KEPT = (KeptFloor(),)


def floor_rows(floors: Sequence[LayerFloor], samples: int, num_microbatches: int) -> Array:
    """Return the corners of floors: [corners, FLOOR_COLUMNS]."""
    found = [row for floor in floors for row in _corner_rows(floor, samples, num_microbatches)]
    return np.array(found).reshape(-1, FLOOR_COLUMNS)


def _corner_rows(floor: LayerFloor, samples: int, count: int) -> list[tuple[float, ...]]:
    seconds, update = floor.seconds.value(samples), floor.step_seconds
    rows: list[tuple[float, ...]] = []
    for state, work in _corners(floor, samples, count):
        ends = {(seconds, work - count * seconds), ((work - update) / count, update)}
        for kept in floor.kept or NOTHING_KEPT:
            again, held = kept.seconds.value(samples), kept.activation_bytes.value(samples)
            rows += [(t + again, u, state, held) for t, u in sorted(ends)]
    return rows


def _corners(floor: LayerFloor, samples: int, count: int) -> list[tuple[float, float]]:
    """Return the corners (state, B t + u) of the line below all ways, least state first."""
    least = count * floor.seconds.value(samples) + floor.step_seconds
    lines = [(0.0, least)] + [
        (p.price, count * p.seconds.value(samples) + p.step_seconds) for p in floor.priced
    ]

    def work(state: float) -> float:
        return max(value - price * state for price, value in lines)

    crossings = {
        (a[1] - b[1]) / (a[0] - b[0]) for a, b in itertools.combinations(lines, 2) if a[0] != b[0]
    }
    states = [floor.state_bytes, *sorted(x for x in crossings if x > floor.state_bytes)]
    corners = [(state, work(state)) for state in states]
    flat = next(n for n, (_, value) in enumerate(corners) if value <= corners[-1][1] * (1 + 1e-12))
    return corners[: flat + 1]
