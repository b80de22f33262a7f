"""Interleaved pipelines whose meshes and borders of stages are given; rows are chosen.

p equal meshes run v stages (chunks) each: stage s is on mesh s mod p. The rows of all chunks of a
mesh are chosen together within its memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from stage_dp.interleaved_bound import FULL, shorter
from stage_dp.interleaved_order import interleaved_order
from stage_dp.joint_chain import Scored, StageChoice
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.menu_table import BACKWARD, FORWARD, STEP, Array
from stage_dp.pipeline_time import pipeline_time
from stage_dp.schedules import SCHEDULE_RULES, Schedule, order

INTERLEAVED = next(rule for rule in SCHEDULE_RULES.values() if rule.interleaves)


class InterleavedChains:
    """Interleaved pipelines at the microbatch count of `costs`."""

    def __init__(self, costs: CountCosts, links: Links) -> None:
        self.costs, self.links = costs, links
        self.classes = costs.table.problem.menu.class_of_layer
        self.count = costs.table.num_microbatches

    def pipeline(
        self, mesh: int, num_meshes: int, cuts: Sequence[int], limit: float = math.inf
    ) -> Scored | None:
        """Return the pipeline of stages between `cuts` on `num_meshes` like `mesh`; None if it does
        not fit or takes `limit` seconds or more, by two short runs of many microbatches."""
        links = self.links.ring(mesh, num_meshes)
        if links is None:
            return None
        num = len(cuts) - 1
        held = self._held(num, num_meshes)
        stages = self._stages(mesh, cuts, held, num_meshes)
        if stages is None:
            return None
        work = [self.count * s.seconds + float(s.columns[STEP]) for s in stages]
        if busiest(np.array(work), num_meshes) >= limit:
            return None
        samples = self.costs.table.samples
        crossing = tuple(
            self.links.seconds(mesh, a.layout_out, mesh, b.layout_in, link, samples)
            for a, b, link in zip(stages, stages[1:], links * (num // num_meshes), strict=False)
        )
        if not all(map(math.isfinite, crossing)):
            return None
        seconds = self._seconds(stages, crossing, num_meshes)
        if seconds >= limit:
            return None
        return Scored(stages, INTERLEAVED, self.count, crossing, held, seconds, num_meshes)

    def exact(self, found: Scored) -> Scored:
        """Return the pipeline with its exact step time."""
        num_meshes = found.num_meshes or 1
        schedule = _order(len(found.stages), self.count, num_meshes)
        seconds = _seconds(schedule, found.stages, found.crossing)
        return evolve(found, step_seconds=seconds)

    def of_stages(
        self,
        stages: Sequence[tuple[int, int, int]],
        num_meshes: int | None,
        limit: float = math.inf,
    ) -> Scored | None:
        """Return the pipeline of stages (first layer, stop, mesh), with its exact step time; None
        if it does not fit or takes `limit` seconds or more, or its meshes are not equal with as
        many stages each."""
        meshes = {mesh for _, _, mesh in stages}
        if num_meshes is None or len(meshes) > 1 or len(stages) % num_meshes:
            return None
        cuts = [start for start, _, _ in stages] + [stages[-1][1]]
        found = self.pipeline(meshes.pop(), num_meshes, cuts, limit)
        return None if found is None else self.exact(found)

    def _held(self, num: int, num_meshes: int) -> tuple[int, ...]:
        """Return the microbatches in flight of each stage."""
        count = shorter(self.count, num_meshes)
        return interleaved_order(num_meshes, num // num_meshes, count).in_flight

    def _stages(
        self, mesh: int, cuts: Sequence[int], held: Sequence[int], num_meshes: int
    ) -> tuple[StageChoice, ...] | None:
        """Return the stages with the rows of each mesh's chunks chosen within its memory."""
        result: dict[int, StageChoice] = {}
        known: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        for first in range(num_meshes):
            own = range(first, len(cuts) - 1, num_meshes)
            parts = [self.classes[cuts[s] : cuts[s + 1]] for s in own]
            classes = tuple(c for part in parts for c in part)
            counts = tuple(held[s] for s, part in zip(own, parts, strict=True) for _ in part)
            starts = tuple(np.cumsum([len(part) for part in parts])[:-1].tolist())
            key = (classes, counts, starts)
            if key not in known:
                known[key] = self.costs.best_rows(mesh, classes, counts, 1 / self.count, starts)
            picks = known[key]
            if picks is None:
                return None
            for s, part, at in zip(own, parts, (0, *starts), strict=True):
                stage = self.costs.stage(mesh, part, picks[at : at + len(part)])
                result[s] = stage.at(cuts[s], cuts[s + 1])
        return tuple(result[s] for s in range(len(cuts) - 1))

    def _seconds(
        self, stages: Sequence[StageChoice], crossing: Sequence[float], num_meshes: int
    ) -> float:
        """Return the step time, by two short runs where there are many microbatches: a mesh that is
        slower by a little may take over late."""
        short = FULL * num_meshes + self.count % num_meshes
        counts = [short, short + num_meshes] if self.count > short + num_meshes else [self.count]
        runs = []
        for count in counts:
            schedule = _order(len(stages), count, num_meshes)
            runs.append(_seconds(schedule, stages, crossing))
        groups = (self.count - counts[0]) / num_meshes
        return runs[0] + groups * (runs[-1] - runs[0])


def busiest(work: Array, num_meshes: int) -> float:
    """Return the work of the busiest mesh from that of each stage."""
    return float(work.reshape(-1, num_meshes).sum(axis=0).max())


@functools.lru_cache(maxsize=16)  # of 20,000 runs at most each; to order them takes longest
def _order(num_stages: int, count: int, num_meshes: int) -> Schedule:
    return order(INTERLEAVED.name, num_stages, count, num_meshes=num_meshes)


def _seconds(schedule: Schedule, stages: Sequence[StageChoice], crossing: Sequence[float]) -> float:
    figures = np.array([stage.columns for stage in stages])
    num = schedule.num_meshes
    tail = [float(figures[mesh::num, STEP].sum()) for mesh in range(num)]
    forward, backward = figures[:, FORWARD], figures[:, BACKWARD]
    return pipeline_time(schedule, forward, backward, crossing, tail).step_seconds
