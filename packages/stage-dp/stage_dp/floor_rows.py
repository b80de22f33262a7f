"""Floors of a menu as rows at one microbatch count, of which mixtures in any proportion are bounds.

With B microbatches every way to run a layer has t >= t0, u >= u0, state >= s0 and, for prices p_j
and shares q_j,

    B t + q_j u + p_j state >= v_j

(-> LayerFloor). Of the polyhedron of such (t, u, state) the vertices are what bounds use of rows,
which are least weighted sums of their columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from alpa_interchange.menu import KeptFloor, LayerFloor
from stage_dp.menu_table import Array

FLOOR_COLUMNS = 8
"""Forward plus backward, step seconds, state, activations, transients; what a split backward takes
and keeps more, and what one more microbatch keeps that waits for its part by weight."""
NOTHING_KEPT = (KeptFloor(),)
FLAT = 1e-9  # determinant of floors that are as good as parallel
NEAR = 1e-9  # of a floor, by which rounding may miss it


def floor_rows(floors: Sequence[LayerFloor], samples: int, num_microbatches: int) -> Array:
    """Return the corners of floors: [corners, FLOOR_COLUMNS]."""
    found = [row for floor in floors for row in _corner_rows(floor, samples, num_microbatches)]
    return np.array(found).reshape(-1, FLOOR_COLUMNS)


def _corner_rows(floor: LayerFloor, samples: int, count: int) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    for runs, update, state in _vertices(floor, samples, count):
        for kept in floor.kept or NOTHING_KEPT:
            again, held = kept.seconds.value(samples), kept.activation_bytes.value(samples)
            working = kept.transient_bytes.value(samples)
            split = kept.split_seconds.value(samples), kept.delayed_bytes.value(samples)
            own = (*split, kept.waiting(samples))
            rows.append((runs / count + again, update, state, held, working, *own))
    return rows


def _vertices(floor: LayerFloor, samples: int, count: int) -> list[tuple[float, float, float]]:
    """Return the vertices (B t, u, state) of what all ways reach at most: where three of the floors
    meet that leave all others satisfied."""
    least = (count * floor.seconds.value(samples), floor.step_seconds, floor.state_bytes)
    values = [count * p.seconds.value(samples) + p.step_seconds for p in floor.priced]
    # Bytes in units that weigh about as much as seconds.
    dearest = max((p.price for p in floor.priced), default=0.0)
    unit = 1 / dearest if dearest else max(floor.state_bytes, 1.0)
    sides = np.array([*np.eye(3), *((1.0, p.step_share, p.price * unit) for p in floor.priced)])
    above = np.array([*least[:2], least[2] / unit, *values])
    sets = np.array(list(itertools.combinations(range(len(sides)), 3)))
    sets = sets[np.abs(np.linalg.det(sides[sets])) > FLAT]
    points = np.linalg.solve(sides[sets], above[sets][..., None])[..., 0]
    slack = NEAR * np.maximum(np.abs(above), 1e-300)
    points = points[(points @ sides.T >= above - slack).all(axis=1)]
    found = {
        tuple(np.round(point / np.maximum(np.abs(point).max(), 1e-300), 9)): point
        for point in points
    }
    return [(float(t), float(u), float(s) * unit) for t, u, s in found.values()]
