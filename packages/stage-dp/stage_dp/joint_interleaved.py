"""Interleaved pipelines of a microbatch count: p equal meshes that run v stages (chunks) each.

Bounds: -> interleaved_bound.py.

Combinations of B, mesh, p and v are tried in the order of that bound with the bubble (p - 1) t / v
of Megatron-LM (Narayanan et al. 2021, section 2.2) in place of its last term. The layers are cut
where the slowest stage is fastest, cuts are moved while that evens out the meshes, and rows are
chosen for them (-> interleaved_chain.py). A layer of the best is then moved from one stage to
another, with all cuts in between, while the step gets faster: a heuristic, with a proven bound.
-> best_interleaved()
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from stage_dp.interleaved_bound import InterleavedBounds
from stage_dp.interleaved_chain import InterleavedChains, busiest
from stage_dp.joint_chain import Scored
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.menu_table import FEW_LAYERS, STEP

# Stages of a mesh that are tried. Six make up for the bubble of few microbatches where layers are
# many: GPT-175B on 1,024 A100 takes 21.2 s a step, 22.0 with up to four, for 2 of 35 CPU s.
CHUNKS = (2, 3, 4, 6)
WORK = 60_000  # stages of the pipelines that are looked at per search, some 1 s
NEAR = 1.1  # of the best, beyond which cuts of a pipeline are not moved
# Pipelines whose cuts are moved, the best first. T5 of 48 layers on 8 RTX TITAN needs five: two
# chunks for each mesh start 6 % behind three, and end 3 % ahead of them.
IMPROVED = 6
# Bounds of one combination: the mean, whole layers, idle time; programs, the last with whole
# layers, only where floors are as sharp as they get. With programs of loose floors too, GPT-175B
# on 1,024 A100 has the same bound by 230 of them instead of 34, in 53 CPU s instead of 40.
FINE, FINEST = 3, 5
# Runs of a schedule up to which a program keeps them all, without whole layers (10 to 50 ms) and
# with (20 to 600 ms). Programs of more keep what meshes wait for: without those the gap of GPT-39B
# on 64 V100 is 4.9 % instead of 3.2 %.
MAX_RUNS = 1000, 300


@frozen
class _Combination:
    mesh: int  # position in CountCosts.meshes
    num_meshes: int
    bound: float
    seconds: tuple[float, ...]  # the least B t + u of each layer
    bytes: tuple[float, ...]  # the least of each layer

    def estimate(self, chunks: int, count: int, crossing: float = 0.0) -> float:
        """Return the bound with the bubble of `chunks` stages per mesh, and the way of one
        microbatch forth and back, of `crossing` seconds at each boundary: chunks that follow one
        another on a mesh wait for it."""
        mean = sum(self.seconds) / self.num_meshes
        bubble = (self.num_meshes - 1) * mean / (count * chunks)
        return self.bound + bubble + 2 * (self.num_meshes * chunks - 1) * crossing


class Interleaving:
    """Interleaved pipelines at the microbatch count of `costs`."""

    def __init__(self, costs: CountCosts, links: Links) -> None:
        self.costs, self.links = costs, links
        self.chains = InterleavedChains(costs, links)
        self.problem = costs.table.problem
        self.classes = self.problem.menu.class_of_layer
        self.count = costs.table.num_microbatches
        # By mesh and how often its floors were made sharper.
        self._known: dict[tuple[int, int], InterleavedBounds] = {}
        # By combination: how often its floors were, and which of the bounds were taken since.
        self._levels: dict[int, tuple[int, int]] = {}
        self._rows: dict[int, InterleavedBounds] = {}  # by mesh, of the menu's rows
        self._combinations = [
            found for mesh in range(len(costs.meshes)) for found in self._of_mesh(mesh)
        ]

        self._least = np.array([found.bound for found in self._combinations])

    def bound(self) -> float:
        """Return the bound, seconds (inf: there is no such pipeline)."""
        return min((found.bound for found in self._combinations), default=math.inf)

    def tries(self, limit: float) -> list[tuple[float, int, int]]:
        """Return (estimated seconds, combination, chunks) of those that may take less than
        `limit`."""
        return [
            (found.estimate(chunks, self.count), n, chunks)
            for n, found in enumerate(self._combinations)
            if found.bound < limit
            for chunks in self._chunks(found.num_meshes)
        ]

    def estimate(self, combination: int, chunks: int, limit: float) -> float:
        """Return the seconds estimated by whole layers and the menu's rows; inf where these take no
        less than `limit`."""
        found = self._combinations[combination]
        if found.mesh not in self._rows:
            rows = self.costs.rows
            self._rows[found.mesh] = InterleavedBounds(rows, found.mesh, self.classes, self.count)
        whole = self._rows[found.mesh].whole_layers(found.num_meshes, limit)
        least = evolve(found, bound=max(found.bound, whole))
        if least.bound >= limit:
            return math.inf
        crossing = self._crossing(found)
        return least.estimate(chunks, self.count, sum(crossing) / len(crossing))

    def starts(self, combination: int, chunks: int) -> list[list[int]]:
        """Return borders of stages where seconds are even, or bytes, and those near them."""
        found = self._combinations[combination]
        even = [
            _evened(shares, _cut(shares, found.num_meshes * chunks), found.num_meshes)
            for shares in (found.seconds, found.bytes)
        ]
        few = len(self.classes) <= FEW_LAYERS
        near = [cuts for cuts, _, _ in _moved(even[-1])] if few else []
        return [list(cuts) for cuts in dict.fromkeys(map(tuple, [*even, *near]))]

    def near(self, combination: int, scored: Scored) -> Iterator[list[int]]:
        """Yield the borders of stages with one layer moved, of those that may take less: the mesh
        that gets it has time for any layer."""
        found, borders = self._combinations[combination], [s.layer_start for s in scored.stages]
        borders.append(scored.stages[-1].layer_stop)
        work = np.array([self.count * s.seconds + s.columns[STEP] for s in scored.stages])
        layer = float((work / np.diff(borders)).min())
        work = work.reshape(-1, found.num_meshes).sum(axis=0)
        for cuts, stage, other in _moved(borders):
            mesh = stage % found.num_meshes
            same = mesh == other % found.num_meshes
            if same or work[mesh] + layer < scored.step_seconds:
                yield cuts

    def best_of(
        self, combination: int, limit: float, some: Sequence[Sequence[int]]
    ) -> Scored | None:
        """Return the fastest pipeline between any of `some` borders of stages if it takes less than
        `limit`."""
        found = self._combinations[combination]
        layers = np.array(found.seconds)
        able = [
            cuts
            for cuts in some
            if busiest(np.add.reduceat(layers, cuts[:-1]), found.num_meshes) < limit
        ]
        return self.chains.best_of(self.costs.meshes[found.mesh], found.num_meshes, able, limit)

    def _chunks(self, num_meshes: int) -> list[int]:
        most = len(self.classes) // num_meshes
        asked = self.problem.num_stages
        return [v for v in CHUNKS if v <= most and asked in (None, num_meshes * v)]

    def refined(self, target: float, limit: float) -> float:
        """Return a bound, `target` or more if it can be: of the least combination a finer one, and
        sharper floors of its mesh where that is not enough. Seconds from `limit` on do not
        matter."""
        while self._combinations:
            at = int(np.argmin(self._least))
            least = self._combinations[at]
            if least.bound >= target:
                return least.bound
            if self._raised(at, limit, FINE):
                continue
            if self.costs.ask_of(least.mesh, sorted(set(self.classes))):
                continue
            if not self._raised(at, limit, FINEST):
                return least.bound
        return math.inf

    def _raised(self, at: int, limit: float, finest: int) -> bool:
        """Take the next finer bound of a combination by the floors at hand; return whether there
        was one."""
        found = self._combinations[at]
        sharp, num = self.costs.times_asked(found.mesh), found.num_meshes
        known, level = self._levels.get(at, (sharp, 0))
        if known != sharp:
            level = 0
        if level >= finest:
            return False
        bounds, chunks = self._bounds(found.mesh), self._chunks(num)
        value = found.bound
        if level == 0:
            value = bounds.mean(num)
        elif level == 1:
            value = bounds.whole_layers(num, limit)
        elif level == 2:
            value = bounds.with_idle_time(num, max(chunks), self._crossing(found))
        else:
            whole, crossing = level > FINE, self._crossing(found)
            value = bounds.by_program(num, chunks, crossing, whole, found.bound, MAX_RUNS[whole])
        self._levels[at] = sharp, level + 1
        self._combinations[at] = evolve(found, bound=max(found.bound, value))
        self._least[at] = self._combinations[at].bound
        return True

    def _crossing(self, found: _Combination) -> list[float]:
        """Return the least seconds one way from each mesh to the next, from the last to the
        first."""
        mesh = self.costs.meshes[found.mesh]
        pairs = set(itertools.pairwise(self.classes))
        return [
            min(self.links.floor(self.costs.table, pair, (mesh, mesh), [link]) for pair in pairs)
            for link in self.links.ring(mesh, found.num_meshes) or ()
        ] or [0.0] * found.num_meshes

    def _bounds(self, position: int) -> InterleavedBounds:
        key = position, self.costs.times_asked(position)
        if key not in self._known:
            rows = self.costs.bounded_rows
            self._known[key] = InterleavedBounds(rows, position, self.classes, self.count)
        return self._known[key]

    def _of_mesh(self, position: int) -> list[_Combination]:
        problem, menu = self.problem, self.problem.menu
        mesh = self.costs.meshes[position]
        size = menu.meshes[mesh].submesh.num_devices
        total = sum(g.num_hosts * g.devices_per_host for g in problem.device_groups)
        bounds = self._bounds(position)
        seconds, bytes = bounds.of_layers()
        return [
            _Combination(position, num, bounds.mean(num), seconds, bytes)
            for num in range(2, min(len(self.classes) // 2, self.links.most_alike(mesh)) + 1)
            if math.isfinite(bounds.mean(num))
            and (not problem.use_all_devices or num * size == total)
            and self._chunks(num)
        ]


def best_interleaved(some: Sequence[Interleaving], limit: float) -> Scored | None:
    """Return the best pipeline met that takes less than `limit` seconds; to begin with it may take
    `NEAR` times as long."""
    waiting = [
        (estimate, False, combination, chunks, at)
        for at, item in enumerate(some)
        for estimate, combination, chunks in item.tries(limit)
    ]
    heapq.heapify(waiting)
    needed = math.isinf(limit)  # there is no other pipeline
    found: list[tuple[float, int, int, int, Scored]] = []
    left, near = WORK, NEAR * limit
    while waiting and waiting[0][0] < near and (left >= 0 or (needed and not found)):
        estimate, fine, combination, chunks, at = heapq.heappop(waiting)
        if not fine:
            estimate = some[at].estimate(combination, chunks, limit)
            heapq.heappush(waiting, (estimate, True, combination, chunks, at))
            continue
        starts = some[at].starts(combination, chunks)
        left -= sum(map(len, starts))
        start = some[at].best_of(combination, near, starts)
        if start is not None:
            found.append((start.step_seconds, len(found), combination, at, start))
            near = min(near, NEAR * start.step_seconds)
    found.sort(key=lambda one: one[:2])
    for place, (_, number, combination, at, scored) in enumerate(found[:IMPROVED]):
        improved: Scored | None = scored
        num = len(scored.stages)
        while improved is not None and left > 0:
            scored = improved
            moved = list(itertools.islice(some[at].near(combination, scored), 1 + left // num))
            left -= len(moved) * num
            improved = some[at].best_of(combination, scored.step_seconds, moved)
        scored = improved or scored
        found[place] = (scored.step_seconds, number, combination, at, scored)
    best: Scored | None = None
    for seconds, _, _, at, scored in sorted(found, key=lambda one: one[:2]):
        if seconds >= (limit if best is None else best.step_seconds):
            break
        # Two short runs may take a little less each microbatch than all of them.
        exact = some[at].chains.exact(scored)
        if best is None or exact.step_seconds < best.step_seconds:
            best = exact
    return best


def _moved(borders: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Yield (borders, stage, other) with a layer more in a stage and one less in another, near ones
    first."""
    num = len(borders) - 1
    for apart in range(1, num):
        for first in range(num - apart):
            last = first + apart
            for stage, other in ((first, last), (last, first)):
                if borders[other + 1] - borders[other] > 1:
                    moved = [
                        at + (1 if stage < other else -1) for at in borders[first + 1 : last + 1]
                    ]
                    yield [*borders[: first + 1], *moved, *borders[last + 1 :]], stage, other


def _cut(seconds: Sequence[float], num_stages: int) -> list[int]:
    """Return the borders of the stages, the slowest of which is as fast as can be."""
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    length = len(total)
    ranges = np.where(np.triu(np.ones((length, length)), 1) > 0, total - total[:, None], np.inf)
    value = np.full(length, np.inf)
    value[0] = 0.0
    before = []
    for _ in range(num_stages):
        through = np.maximum(value[:, None], ranges)
        # Of equal ones the cut nearest to an even share.
        before.append(np.argmin(through + 1e-9 * ranges, axis=0))
        value = through.min(axis=0)
    borders = [length - 1]
    for choice in reversed(before):
        borders.append(int(choice[borders[-1]]))
    return borders[::-1]


def _evened(seconds: Sequence[float], borders: list[int], num_meshes: int) -> list[int]:
    """Return the borders moved, a layer at a time, while the slowest mesh gets faster."""
    total = np.concatenate([[0.0], np.cumsum(seconds)])

    def load(cuts: Sequence[int]) -> tuple[float, float]:
        stages: NDArray[np.float64] = np.diff(total[list(cuts)])
        meshes = [float(stages[mesh::num_meshes].sum()) for mesh in range(num_meshes)]
        return max(meshes), float(np.square(meshes).sum())

    best = load(borders)
    for _ in range(len(seconds)):
        moved = False
        for trial, _, _ in itertools.islice(_moved(borders), 2 * len(borders)):
            value = load(trial)
            if value < (best[0] * (1 - 1e-12), best[1] * (1 - 1e-12)):
                best, borders, moved = value, trial, True
        if not moved:
            break
    return borders
