"""Pipelines with all choices made, and their exact step times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from attrs import frozen

from stage_dp.batched_time import batched_step_seconds, extrapolated_step_seconds
from stage_dp.joint_links import Links
from stage_dp.joint_schedules import JointRule, useful_extras, warmups
from stage_dp.menu_table import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    STATE,
    STEP,
    TRANSIENT,
    Array,
    MenuTable,
)

MAX_EXTRAS = 64  # ways to share out the microbatches in flight that are tried for one pipeline


@frozen(eq=False)
class StageChoice:
    """A stage with its rows. `columns` [7] as in ClassRows."""

    layer_start: int
    layer_stop: int
    mesh: int
    columns: Array
    layout_in: int
    layout_out: int
    rows: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Return forward plus backward of one microbatch."""
        return float(self.columns[FORWARD] + self.columns[BACKWARD])

    def need(self, in_flight: int) -> float:
        """Return bytes per device with `in_flight` microbatches alive."""
        c = self.columns
        return float(c[STATE] + in_flight * c[ACTIVATION] + c[TRANSIENT])


@frozen(eq=False)
class Scored:
    """A pipeline with its step time."""

    stages: tuple[StageChoice, ...]
    rule: JointRule
    num_microbatches: int
    crossing: tuple[float, ...]  # per boundary
    in_flight: tuple[int, ...]
    step_seconds: float


def score(
    chains: Iterable[Sequence[StageChoice]],
    rule: JointRule,
    table: MenuTable,
    links: Links,
    *,
    quick: bool = False,
    limit: float = math.inf,
) -> Scored | None:
    """Return the best of `chains` that can be placed and fits in memory; None if none does.

    `quick`: step times of many microbatches are extrapolated. Pipelines that cannot take less than
    `limit` seconds are left out.
    """
    timed = extrapolated_step_seconds if quick else batched_step_seconds
    groups: dict[tuple[int, ...], list[tuple[tuple[StageChoice, ...], tuple[float, ...]]]] = {}
    for chain in chains:
        stages = tuple(chain)
        meshes = [stage.mesh for stage in stages]
        if links.placed(meshes) is None:
            continue
        crossing = tuple(
            links.seconds(a.mesh, a.layout_out, b.mesh, b.layout_in, link, table.samples)
            for a, b, link in zip(stages, stages[1:], links.crossed(meshes), strict=False)
        )
        if not all(map(math.isfinite, crossing)):
            continue
        if _least_seconds(stages, crossing, table) >= limit:
            continue
        for held in _in_flight(stages, crossing, rule, table, 1 if quick else MAX_EXTRAS):
            groups.setdefault(held, []).append((stages, crossing))
    best: Scored | None = None
    for held, members in groups.items():
        figures = np.array([[s.columns for s in stages] for stages, _ in members])
        seconds = timed(
            held,
            table.num_microbatches,
            figures[:, :, FORWARD],
            figures[:, :, BACKWARD],
            np.array([crossing for _, crossing in members]).reshape(len(members), -1),
            figures[:, :, STEP],
        )
        at = int(np.argmin(seconds))
        if best is None or seconds[at] < best.step_seconds:
            stages, crossing = members[at]
            count = table.num_microbatches
            best = Scored(stages, rule, count, crossing, held, float(seconds[at]))
    return best


def _least_seconds(
    stages: Sequence[StageChoice], crossing: Sequence[float], table: MenuTable
) -> float:
    """Return a bound on the step time: each mesh's work and the way to it."""
    way, least = 0.0, 0.0
    for stage, c in zip(stages, (*crossing, 0.0), strict=True):
        busy = table.num_microbatches * stage.seconds
        least = max(least, way + busy + float(stages[0].columns[STEP]))
        least = max(least, busy + float(stage.columns[STEP]))
        way += stage.seconds + 2 * c
    return max(least, way + float(stages[0].columns[STEP]))


def _in_flight(
    stages: Sequence[StageChoice],
    crossing: Sequence[float],
    rule: JointRule,
    table: MenuTable,
    most: int,
) -> list[tuple[int, ...]]:
    """Return the distinct microbatches in flight that fit in memory and may be of use."""
    count = table.num_microbatches
    num = len(stages)

    def fits(held: tuple[int, ...]) -> bool:
        return all(s.need(k) <= table.memory[s.mesh] for s, k in zip(stages, held, strict=True))

    if not rule.flexible:
        held = warmups(rule, count, (), num)
        return [held] if fits(held) else []
    useful = useful_extras(crossing, [stage.seconds for stage in stages])
    useful = tuple(min(extra, count) for extra in useful)
    if math.prod(extra + 1 for extra in useful) <= most:
        tries = list(itertools.product(*(range(extra + 1) for extra in useful)))
    else:
        tries = _growing(useful, count, rule, fits)
    return list(dict.fromkeys(h for t in tries if fits(h := warmups(rule, count, t, num))))


def _growing(
    useful: tuple[int, ...], count: int, rule: JointRule, fits: Callable[[tuple[int, ...]], bool]
) -> list[tuple[int, ...]]:
    """Return none, all, and what fits when boundaries are given theirs from the last to the first
    and from the first to the last."""
    num = len(useful) + 1
    result = [(0,) * len(useful), useful]
    for order in (range(len(useful)), reversed(range(len(useful)))):
        extras = [0] * len(useful)
        for at in order:
            for extra in range(1, useful[at] + 1):
                trial = [*extras[:at], extra, *extras[at + 1 :]]
                if not fits(warmups(rule, count, trial, num)):
                    break
                extras = trial
        result.append(tuple(extras))
    return result
