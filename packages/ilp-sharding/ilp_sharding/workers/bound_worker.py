"""The search for bounds, run by worker 0.

1. Multipliers rise; now and then a choice is grown from the messages -> _ascend().
2. With a choice at hand, strategies whose reduced cost exceeds the gap are dropped, and the ascent
   goes on with the smaller graph -> _fix().
3. Once the graph is small, HiGHS finishes it; where the gap stays wide, branching raises the bound:
   on the strategies that use much memory -> branching, on large graphs on the nodes with many
   neighbours, which also leads to choices -> hub_branching.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from ilp_sharding.bound.dominance import simplified, without_dominated
from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.bound.messages import choice_cost
from ilp_sharding.branching.hubs import HubTree
from ilp_sharding.branching.memory_nodes import Branching
from ilp_sharding.choice.construction import PrimalSearch
from ilp_sharding.exact.integer_program import IntegerProgram
from ilp_sharding.problem.flat_graph import TableGraph

if TYPE_CHECKING:
    from ilp_sharding.workers.process import Worker

_DOMINANCE_ENTRIES = 3e5  # table entries up to which dominance is quick enough to repeat
_PAUSE = 2.0  # times as long as growing the last choice took, before the next
_MOVING = 0.2  # while a slice gains more than this share of the gap, the ascent is not disturbed
_SETTLED = 1e-4  # share of a full step below which multipliers hardly move any more
_FIRST_DIVE = 10  # steps of hub branching before the first choice is made,
_DIVE_SHARE = 0.4  # and share of the time for choices
_LARGE_NODES = 2000  # nodes of a graph from which on hubs are branched on
_PROGRAM_ENTRIES = 3e4  # table entries up to which the integer program is tried at once


def search_bounds(worker: Worker) -> None:
    """Raise the published bound until the deadline or a proof."""
    graph = worker.graph
    if not graph.num_nodes:
        worker.offer(graph, np.zeros(0, np.int64), graph.constant)
        worker.board.raise_bound(0, graph.constant, finished=True)
        return
    dual = DualAscent(graph)
    growth = _Growth()
    seconds = max(worker.until - time.perf_counter(), 0.1)
    last_size = graph.num_strategies
    fixed_gap = math.inf
    stalled = branched = 0
    while not worker.late:
        before = dual.best
        _ascend(worker, dual, growth, max(0.02 * seconds, 0.1))
        gap = worker.board.best - dual.best
        if math.isinf(gap):
            continue
        if math.isfinite(before) and dual.best - before > _MOVING * gap:
            continue
        if gap > 0.7 * fixed_gap and stalled < 1:
            stalled = _stalled(stalled, dual.best - before, gap)
            continue
        fixed_gap = gap
        smaller = _fix(worker, dual)
        if smaller is None or smaller.num_nodes == 0:
            _close(worker, smaller)
            return
        if smaller.num_strategies < 0.97 * last_size:
            last_size = smaller.num_strategies
            dual = dual.carried(smaller)
            worker.publish_active(smaller)
            stalled = 0
            continue
        stalled = _stalled(stalled, dual.best - before, gap)
        if len(dual.graph.tables.entry) < _PROGRAM_ENTRIES and stalled >= 1:
            _finish(worker, dual)
            return
        if stalled >= 2 and dual.graph.num_nodes <= _LARGE_NODES:
            _branch(worker, dual)
            return
        if stalled >= 2 and dual.stretch < _SETTLED and branched != last_size:
            branched = last_size  # once for a graph
            _branch_hubs(worker, dual, seconds)
            dual.restore()


def _stalled(count: int, gained: float, gap: float) -> int:
    """Return how many slices in a row gained next to nothing of the gap."""
    return count + 1 if gained < 0.02 * gap else 0


def _ascend(worker: Worker, dual: DualAscent, growth: _Growth, seconds: float) -> None:
    """Raise multipliers for a slice of time, then grow a choice and publish."""
    end = worker.slice(seconds)
    while time.perf_counter() < end:
        dual.run(min(time.perf_counter() + 0.25, end), lambda: worker.board.best)
        worker.raise_bound(dual.best)
    dual.restore()
    dual.priced(dual.best_multipliers)
    prices = np.zeros(worker.base.num_strategies)
    prices[worker.base_strategies(dual.graph)] = dual.price
    worker.board.publish_prices(prices)
    growth.grow(worker, dual)


class _Growth:
    """Choices grown from messages, for a share of the time: the first ones take the longest, and
    the later ones are the better.
    """

    def __init__(self) -> None:
        self.ended, self.lasted = 0.0, 0.0

    def grow(self, worker: Worker, dual: DualAscent) -> None:
        """Grow a choice from the messages of `dual` and offer it, unless the last was just now."""
        began = time.perf_counter()
        if began - self.ended < _PAUSE * self.lasted:
            return
        primal = PrimalSearch(dual.graph, worker.seed + dual.steps)
        primal.construct(dual.decoded(), dual.price, rounds=6, polish=10)
        if primal.x is not None:
            worker.offer(primal.graph, primal.x, primal.cost)
        self.ended = time.perf_counter()
        self.lasted = self.ended - began


def _fix(worker: Worker, dual: DualAscent) -> TableGraph | None:
    """Return the graph without strategies that no better choice can use; None if none is left."""
    cutoff = worker.cutoff()
    active = np.ones(dual.graph.num_strategies, bool)
    for bound, reduced in dual.reduced(3):
        worker.raise_bound(bound)
        active &= bound + reduced <= cutoff
    if active.sum() > 0.98 * len(active):
        return dual.graph
    smaller = simplified(dual.graph, active)
    small = len(dual.graph.tables.entry) < _DOMINANCE_ENTRIES
    return without_dominated(smaller) if small else smaller


def _close(worker: Worker, graph: TableGraph | None) -> None:
    """Publish the proof that no better choice is left, or the one choice that is."""
    if graph is not None:
        none = np.zeros(0, np.int64)
        if not len(graph.rows.slack) or graph.rows.slack.min() >= 0:
            worker.offer(graph, none, graph.constant)
    worker.board.raise_bound(0, worker.board.best, finished=True)


def _finish(worker: Worker, dual: DualAscent) -> None:
    """Let HiGHS solve what is left."""
    graph = dual.graph
    program = IntegerProgram.of_graph(graph, cutoff=worker.cutoff(), seed=worker.seed)

    def improved(chosen: np.ndarray, _: float) -> None:
        exact = choice_cost(graph.tables, graph.tables.cost, chosen) + graph.constant
        worker.offer(graph, chosen, exact)

    outcome = program.solve(worker.until, on_bound=worker.raise_bound, on_choice=improved)
    if outcome.finished:
        worker.board.raise_bound(0, worker.board.best, finished=True)
    else:
        worker.raise_bound(min(outcome.lower_bound, worker.board.best))


def _branch_hubs(worker: Worker, dual: DualAscent, seconds: float) -> None:
    """Branch on hubs until the deadline or a proof; now and then dive for a choice.

    Ends early if the first steps gain next to nothing of the gap.
    """
    tree = HubTree(dual)
    root = tree.bound
    began = time.perf_counter()
    diving = 0.0
    least = math.inf  # bound of the best dive so far: only better ones are worth more time
    while not worker.late:
        bound = tree.step(worker.cutoff())
        worker.raise_bound(min(bound, worker.board.best))
        if tree.done:
            if bound > worker.cutoff():
                worker.board.raise_bound(0, worker.board.best, finished=True)
            return
        if tree.steps < _FIRST_DIVE:
            continue
        if tree.steps == _FIRST_DIVE and _stalled(0, bound - root, worker.board.best - root):
            return
        now = time.perf_counter()
        if diving <= _DIVE_SHARE * (now - began):
            dived = tree.dive(min(least, worker.cutoff()), lambda: worker.late)
            if dived is not None:
                least, active = dived
                _settle(worker, dual, active, 0.04 * seconds)
            diving += time.perf_counter() - now


def _settle(worker: Worker, dual: DualAscent, active: np.ndarray, seconds: float) -> None:
    """Raise memory multipliers anew with the `active` strategies only, and offer a choice."""
    graph = simplified(dual.graph, active)
    if graph is None or not graph.num_nodes:
        return
    dual = dual.carried(graph)
    dual.run(worker.slice(seconds), lambda: worker.board.best)
    if dual.best > worker.cutoff():
        return
    dual.restore()
    primal = PrimalSearch(graph, worker.seed)
    primal.construct(dual.decoded(), dual.price, rounds=6, polish=10)
    primal.improve(dual.price, worker.slice(0.5 * seconds))
    if primal.x is not None:
        worker.offer(graph, primal.x, primal.cost)


def _branch(worker: Worker, dual: DualAscent) -> None:
    """Branch until the deadline or a proof."""
    tree = Branching(dual)
    primal = PrimalSearch(dual.graph, worker.seed)
    while not worker.late:
        bound = tree.step(worker.cutoff())
        worker.raise_bound(min(bound, worker.board.best))
        if tree.done:
            if bound > worker.cutoff():
                worker.board.raise_bound(0, worker.board.best, finished=True)
            return
        if tree.steps % 20 == 0:
            primal.construct(dual.backward, dual.price)
            if primal.x is not None:
                worker.offer(primal.graph, primal.x, primal.cost)
