"""The search counted in rounds instead of seconds, in this process, so that it can be repeated.

A round raises memory multipliers by some steps, grows a choice from the messages, improves it by
some ball moves, and drops the strategies that no better choice can use: what the worker processes
do side by side for a time (`bound_worker`, `choice_worker`), one after the other.
"""

from __future__ import annotations

import math
import time

import numpy as np

from ilp_sharding.compiled_loops import load
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.methods.narrowing import Expand, expansion, narrowing_seconds
from ilp_sharding.methods.reduced import Reduced
from ilp_sharding.problem.flat_graph import TableGraph, table_graph
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search
from ilp_sharding.workers.pool import WORKER_SECONDS

_STEPS = 50  # of multipliers in a round, and
_MOVES = 200  # ball moves
_ROUNDS = 100  # of a search in this process before workers start, if time does not end it
_SHRINKING = 0.95  # the graph is made anew once at most this share of its strategies is left


def counted_seconds(reduced: Reduced) -> float:
    """Return 0 if the caller asks for so many rounds, else inf."""
    return math.inf if reduced.rounds is None else 0.0


def search_counted(reduced: Reduced) -> bool:
    """Search as many rounds as the caller asks for; that ends the search."""
    assert reduced.rounds is not None
    _search(reduced, reduced.rounds)
    reduced.find_smallest_memory()
    return True


def short_seconds(reduced: Reduced) -> float:
    """Return how long `search_briefly` may take, inf where work is counted or workers have too
    little time after it."""
    search = reduced.search
    if search.max_nodes is not None or search.seconds < 2.0 * WORKER_SECONDS:
        return math.inf
    return max(WORKER_SECONDS, narrowing_seconds(reduced))


def search_briefly(reduced: Reduced) -> bool:
    """Return whether rounds end the search in less time than workers take to load."""
    search, until = reduced.search, reduced.search.until
    search.until = time.perf_counter() + WORKER_SECONDS
    try:
        _search(reduced, _ROUNDS)
    finally:
        search.until = until
    if not (search.closed or search.infeasible):
        return False
    reduced.find_smallest_memory()
    return True


def _search(reduced: Reduced, rounds: int) -> None:
    search = reduced.search
    try:
        search_rounds(reduced.network, reduced.memory, search, rounds)
    except NoAssignment:
        search.infeasible = search.choice is None
        search.raise_bound(search.objective, "search")


def search_rounds(
    network: Network, memory: MemoryProfile | None, search: Search, rounds: int
) -> None:
    """Search the reduced `network` into `search` for `rounds` rounds or until a proof."""
    load("bound.messages", "bound.dominance", "choice.forest_moves", "choice.ball_minimisation")
    # not needed, and slow to import, where problems are solved directly
    from ilp_sharding.bound.dominance import simplified, without_dominated
    from ilp_sharding.bound.dual_ascent import DualAscent
    from ilp_sharding.choice.ball_minimisation import search_neighbourhoods
    from ilp_sharding.choice.construction import PrimalSearch
    from ilp_sharding.methods.narrowing import solve_rest

    expand = expansion(network)
    graph = without_dominated(simplified(table_graph(network, memory)))
    if graph is None or _settled(expand, search, graph):
        raise NoAssignment
    dual, primal = DualAscent(graph), PrimalSearch(graph, search.seed)
    for _ in range(rounds):
        for _ in range(_STEPS):
            dual.step(search.objective)
        if dual.best == np.inf:
            raise NoAssignment
        search.raise_bound(dual.best, "search")
        dual.restore()
        dual.priced(dual.best_multipliers)
        primal.construct(dual.decoded(), dual.price, rounds=6, polish=10)
        if primal.x is not None:
            x = primal.x.copy()
            search_neighbourhoods(
                *(graph.tables, graph.rows, dual.price, x, primal.left(x)),
                *(primal.sizes, primal.scores, primal.table_limit, _MOVES),
            )
            primal.take(x)
            search.offer(expand(graph.lift(primal.x)), "search")
        if search.closed or search.late:
            return
        ((bound, reduced),) = dual.reduced(1)
        active = bound + reduced <= search.cutoff()
        if np.count_nonzero(active) > _SHRINKING * len(active):
            continue
        smaller = simplified(graph, active)
        if smaller is None or _settled(expand, search, smaller):
            raise NoAssignment
        if solve_rest(expand, search, smaller, search.cutoff(), dual):
            raise NoAssignment
        kept = None if primal.x is None else smaller.lower(graph.lift(primal.x))
        graph, dual, primal = smaller, dual.carried(smaller), PrimalSearch(smaller, search.seed)
        if kept is not None:
            primal.take(kept)


def _settled(expand: Expand, search: Search, graph: TableGraph) -> bool:
    """Return whether `graph` leaves no choice to make; offer the only one if it keeps the rows."""
    if graph.num_nodes:
        return False
    if graph.rows.slack.min(initial=0.0) >= 0:
        search.offer(expand(graph.lift(np.zeros(0, np.int64))), "search")
    return True
