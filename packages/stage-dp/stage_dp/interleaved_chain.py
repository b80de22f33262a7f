"""Interleaved pipelines whose meshes and borders of stages are given; rows are chosen.

p equal meshes run v stages (chunks) each: stage s is on mesh s mod p. The rows of all chunks of a
mesh are chosen together within its memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from stage_dp.interleaved_order import Index, InterleavedOrder, holding_order
from stage_dp.interleaved_time import (
    INTERLEAVED,
    estimated_seconds,
    interleaved_schedule,
)
from stage_dp.joint_chain import Scored, StageChoice
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.menu_table import ACTIVATION, BACKWARD, FORWARD, STEP, TRANSIENT, Array
from stage_dp.mesh_memory import Chunk, fullest
from stage_dp.pipeline_time import pipeline_time

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
        self._known: dict[tuple[object, ...], _Chunks | None] = {}

    def pipeline(
        self, mesh: int, num_meshes: int, cuts: Sequence[int], limit: float = math.inf
    ) -> Scored | None:
        """Return the pipeline of stages between `cuts` on `num_meshes` like `mesh`; None if it does
        not fit or takes `limit` seconds or more, by two short runs of many microbatches."""
        return self.best_of(mesh, num_meshes, [cuts], limit)

    def best_of(
        self, mesh: int, num_meshes: int, some: Sequence[Sequence[int]], limit: float = math.inf
    ) -> Scored | None:
        """Return the fastest `pipeline` of those between `some` cuts, as many each."""
        links = self.links.ring(mesh, num_meshes)
        if links is None or not some:
            return None
        chunks = (len(some[0]) - 1) // num_meshes
        runs = holding_order(num_meshes, chunks, self.count)
        samples = self.costs.table.samples
        found = []
        for cuts in some:
            chosen = self._stages(mesh, cuts, runs)
            if chosen is None:
                continue
            work = [self.count * one.seconds + float(one.columns[STEP]) for one in chosen[0]]
            if busiest(np.array(work), num_meshes) >= limit:
                continue
            crossing = tuple(
                self.links.seconds(mesh, a.layout_out, mesh, b.layout_in, link, samples)
                for a, b, link in zip(chosen[0], chosen[0][1:], links * chunks, strict=False)
            )
            if all(map(math.isfinite, crossing)):
                found.append((*chosen, crossing))
        if not found:
            return None
        figures = np.array([[one.columns for one in stages] for stages, _, _ in found])
        by_mesh = figures[:, :, STEP].reshape(len(found), chunks, num_meshes)
        seconds = estimated_seconds(
            num_meshes,
            self.count,
            figures[:, :, FORWARD],
            figures[:, :, BACKWARD],
            np.array([crossing for _, _, crossing in found]),
            by_mesh.sum(axis=1),
        )
        at = int(seconds.argmin())
        if seconds[at] >= limit:
            return None
        stages, held, crossing = found[at]
        least = float(seconds[at])
        return Scored(stages, INTERLEAVED, self.count, crossing, held, least, num_meshes)

    def exact(self, found: Scored) -> Scored:
        """Return the pipeline with its exact step time."""
        num_meshes = found.num_meshes or 1
        schedule = interleaved_schedule(len(found.stages), self.count, num_meshes)
        figures = np.array([stage.columns for stage in found.stages])
        tail = [float(figures[mesh::num_meshes, STEP].sum()) for mesh in range(num_meshes)]
        forward, backward = figures[:, FORWARD], figures[:, BACKWARD]
        exact = pipeline_time(schedule, forward, backward, found.crossing, tail)
        return evolve(found, step_seconds=exact.step_seconds)

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
        for first, alive in enumerate(runs.alive):
            own = range(first, num, num_meshes)
            parts = tuple(self.classes[cuts[s] : cuts[s + 1]] for s in own)
            key = (mesh, parts, alive.tobytes())
            if key not in self._known:
                even = runs.in_flight[first::num_meshes]
                self._known[key] = self._chunks(mesh, parts, even, alive)
            chunks = self._known[key]
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


def _held(stage: StageChoice, in_flight: int) -> Chunk:
    columns = stage.columns
    transient = float(columns[TRANSIENT])
    lasting = stage.need(in_flight) - transient
    return Chunk(lasting, in_flight, float(columns[ACTIVATION]), transient)


def busiest(work: Array, num_meshes: int) -> float:
    """Return the work of the busiest mesh from that of each stage."""
    return float(work.reshape(-1, num_meshes).sum(axis=0).max())
