"""Interleaved pipelines whose meshes and borders of stages are given; rows are chosen.

p equal meshes run v stages (chunks) each: stage s is on mesh s mod p. The rows of all chunks of a
mesh are chosen together within its memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from stage_dp.interleaved_order import FULL, Index, InterleavedOrder, holding_order
from stage_dp.joint_chain import Scored, StageChoice
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.menu_table import ACTIVATION, BACKWARD, FORWARD, STEP, TRANSIENT, Array
from stage_dp.mesh_memory import Chunk, fullest
from stage_dp.pipeline_time import pipeline_time
from stage_dp.schedules import SCHEDULE_RULES, Schedule, order

INTERLEAVED = next(rule for rule in SCHEDULE_RULES.values() if rule.interleaves)


# In which rows are chosen for one moment of a mesh. Of 120 random problems (those of the tests of
# long ones) four have no plan without, and the others take half a percent longer; with 1 and 6
# rounds they take the same.
MOMENT_ROUNDS = 2

_Chunks = tuple[list[StageChoice], tuple[int, ...]]  # with microbatches in flight


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
        runs = holding_order(num_meshes, num // num_meshes, self.count)
        found = self._stages(mesh, cuts, runs)
        if found is None:
            return None
        stages, held = found
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

    def _stages(
        self, mesh: int, cuts: Sequence[int], runs: InterleavedOrder
    ) -> tuple[tuple[StageChoice, ...], tuple[int, ...]] | None:
        """Return the stages with the rows of each mesh's chunks chosen within its memory, and the
        microbatches of each that are alive when its mesh holds most."""
        num_meshes, num = runs.num_meshes, len(cuts) - 1
        result, in_flight = dict[int, StageChoice](), dict[int, int]()
        known: dict[tuple[object, ...], _Chunks | None] = {}
        for first, alive in enumerate(runs.alive):
            own = range(first, num, num_meshes)
            parts = tuple(self.classes[cuts[s] : cuts[s + 1]] for s in own)
            key = (parts, alive.tobytes())
            if key not in known:
                known[key] = self._chunks(mesh, parts, runs.in_flight[first::num_meshes], alive)
            chunks = known[key]
            if chunks is None:
                return None
            for s, chunk, held in zip(own, *chunks, strict=True):
                result[s], in_flight[s] = chunk.at(cuts[s], cuts[s + 1]), held
        return tuple(result[s] for s in range(num)), tuple(in_flight[s] for s in range(num))

    def _chunks(
        self, mesh: int, parts: Sequence[tuple[int, ...]], even: Sequence[int], alive: Index
    ) -> _Chunks | None:
        """Return the chunks of a mesh, of the classes `parts`, whose rows fit at every moment, and
        how many microbatches of each are alive when they need most.

        Rows are chosen for the moment when layers hold most microbatches, then for that when the
        rows so far do; where nothing of a chunk is alive then, for `even` [chunks] with as much
        less memory; at last for the most microbatches of every chunk.
        """
        classes = tuple(itertools.chain.from_iterable(parts))
        starts = tuple(np.cumsum([len(part) for part in parts])[:-1].tolist())
        memory, withheld = self.costs.table.memory[mesh], 0.0
        filled = alive[alive.min(axis=1) > 0]
        held = filled[(filled @ [len(part) for part in parts]).argmax()].tolist()
        for attempt in range(MOMENT_ROUNDS + 1):
            if attempt == MOMENT_ROUNDS:
                held, withheld = alive.max(axis=0).tolist(), 0.0
            counts = tuple(k for k, part in zip(held, parts, strict=True) for _ in part)
            weight = 1 / self.count
            picks = self.costs.best_rows(mesh, classes, counts, weight, starts, withheld=withheld)
            if picks is None:
                continue
            chunks = [
                self.costs.stage(mesh, part, picks[at : at + len(part)])
                for part, at in zip(parts, (0, *starts), strict=True)
            ]
            needed, most = fullest([_held(c, k) for c, k in zip(chunks, held, strict=True)], alive)
            if needed <= memory * (1 + 1e-9):
                return chunks, most if min(most) > 0 else tuple(even)
            if min(most) > 0 and most != tuple(held):
                held = list(most)
            else:
                held, withheld = list(even), withheld + needed - memory
        return None

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


def _held(stage: StageChoice, in_flight: int) -> Chunk:
    columns = stage.columns
    transient = float(columns[TRANSIENT])
    lasting = stage.need(in_flight) - transient
    return Chunk(lasting, in_flight, float(columns[ACTIVATION]), transient)


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
