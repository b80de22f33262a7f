"""Wide graphs made narrow by message bounds, in this process.

Messages (see `dual`) give a bound B and a reduced cost r_v of every strategy v: each choice that
uses v costs at least B + r_v. For any guess C of the optimum the strategies with B + r_v > C may be
left out; let v(C) be the optimum of what is left. Every choice left out costs more than C, so

    v(C) <= C  =>  v(C) is the optimum;          else  the optimum > C, and v(C) is a choice's cost.

The guesses rise from just above B, where little is left, until that holds or what is left is too
large for elimination or HiGHS -> narrow(). Planner problems have tight bounds unless memory binds,
and the first guess ends the search.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from ilp_sharding.direct import (
    DENSE_USAGE,
    ELIMINATION_WORK,
    PROGRAM_TABLES,
    Search,
    exact_memory,
)
from ilp_sharding.elimination import Elimination
from ilp_sharding.memory import MemoryProfile
from ilp_sharding.network import Network, NoAssignment
from ilp_sharding.table_graph import TableGraph, table_graph

NARROWING_TABLES = 2e7  # table entries up to which sweeps in this process are quick
_GUESSES = (1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 4e-3, 1.6e-2)  # relative rise over the bound
_LOADING_SECONDS = 5.0  # of compiled loops from the cache; it cannot be interrupted
_SWEEPS = 60  # of messages without memory rows
_STEPS = 400  # of multipliers with them
_SWEPT_TABLES = 4e8  # table entries all sweeps together may visit where memory binds


def ready(seconds: float) -> bool:
    """Return whether the compiled loops ran before in this process, or `seconds` are enough.

    The first call of a loop compiles it, or reads it from numba's cache.
    """
    messages = sys.modules.get("ilp_sharding.messages")
    compiled = messages is not None and bool(messages.decode.signatures)
    return compiled or seconds > _LOADING_SECONDS


def narrow(network: Network, search: Search, memory: MemoryProfile | None) -> bool:
    """Solve the reduced `network` into `search` if messages leave little of it; return whether.

    `memory` is None if no limit binds. Otherwise the caller has a bound and often a choice, and the
    same problem to go on with.
    """
    # compiled loops take a moment to load: not for problems that never come here
    from ilp_sharding.dual import DualAscent

    slack = np.zeros(0)
    if memory is not None:
        slack = memory.slack + (0.0 if exact_memory(search.instance) else memory.tolerance())
    base = table_graph(network, memory, slack)
    nodes = network.open_nodes()
    graph = _restricted(base, np.ones(base.num_strategies, bool)) if memory is not None else base
    if graph is None or not graph.num_nodes:
        return False
    dual = DualAscent(graph)
    steps = _SWEEPS
    if graph.num_times:
        steps = int(min(_STEPS, _SWEPT_TABLES / max(len(graph.tables.entry), 1)))
    quiet = 0
    for _ in range(steps):
        before = dual.best
        dual.step(search.objective)
        quiet = quiet + 1 if dual.best - before <= 1e-12 * abs(dual.best) else 0
        if search.late or (not graph.num_times and quiet >= 3):
            break
    if dual.best == math.inf:
        raise NoAssignment
    search.raise_bound(dual.best, "messages")
    pairs = dual.reduced(3)
    search.raise_bound(dual.best, "messages")
    for rise in _GUESSES:
        if search.late:
            return False
        cutoff = min(dual.best + rise * abs(dual.best), search.cutoff())
        active = np.ones(graph.num_strategies, bool)
        for bound, reduced in pairs:
            active &= bound + reduced <= cutoff
        rest = _restricted(graph, active)
        if rest is None:
            search.raise_bound(cutoff, "narrowing")
        elif not _solve_rest(network, nodes, search, rest, cutoff):
            return False
        if search.objective <= cutoff:
            search.lower_bound = search.objective
            search.report("narrowing")
        if search.closed or cutoff >= search.cutoff():
            search.raise_bound(search.objective, "narrowing")
            return True
    return False


def _restricted(graph: TableGraph, active: np.ndarray) -> TableGraph | None:
    """Return `graph` with the `active` strategies only, None if some node has none."""
    if graph.num_times and graph.num_nodes:
        from ilp_sharding.dominance import simplified

        return simplified(graph, active)
    if graph.num_nodes and not np.logical_or.reduceat(active, graph.tables.offset[:-1]).all():
        return None
    return graph.restricted(active)


def _solve_rest(
    network: Network, nodes: list[int], search: Search, rest: TableGraph, cutoff: float
) -> bool:
    """Offer the best choice of `rest`, raise the bound; return False if it is too large."""
    from ilp_sharding.integer_program import IntegerProgram

    sizes = dict(enumerate(np.diff(rest.tables.offset).tolist()))
    if not rest.num_times:
        costs, tables = _as_tables(rest)
        elimination = Elimination(range(rest.num_nodes), sizes, tables, ELIMINATION_WORK)
        if elimination.complete:
            value, chosen = elimination.solve(costs, until=search.until)
            if value < math.inf:
                x = np.array([chosen[i] for i in range(rest.num_nodes)], dtype=np.int64)
                full = dict(zip(nodes, rest.lift(x).tolist(), strict=True))
                search.offer(network.expand(full), "narrowing")
            if value + rest.constant > cutoff:
                search.raise_bound(cutoff, "narrowing")
            return True
    if len(rest.tables.entry) > PROGRAM_TABLES:
        return False
    if rest.num_times * float(rest.num_strategies) > DENSE_USAGE:
        return False
    program = IntegerProgram.of_graph(rest, cutoff=cutoff, seed=search.seed)
    outcome = program.solve(search.until)
    if outcome.chosen is not None:
        full = dict(zip(nodes, rest.lift(outcome.chosen).tolist(), strict=True))
        search.offer(network.expand(full), "narrowing")
    if outcome.finished and search.objective > cutoff:
        search.raise_bound(cutoff, "narrowing")
    return outcome.finished


def _as_tables(graph: TableGraph) -> tuple[dict[int, np.ndarray], list[dict[int, np.ndarray]]]:
    """Return (costs, tables) of `graph` in the form that elimination takes."""
    arrays = graph.tables
    offset, bounds = arrays.offset.tolist(), arrays.entry_offset.tolist()
    costs = {i: arrays.cost[offset[i] : offset[i + 1]] for i in range(graph.num_nodes)}
    tables: list[dict[int, np.ndarray]] = [{} for _ in range(graph.num_nodes)]
    for e, (a, b) in enumerate(zip(arrays.first.tolist(), arrays.second.tolist(), strict=True)):
        table = arrays.entry[bounds[e] : bounds[e + 1]].reshape(len(costs[a]), len(costs[b]))
        tables[a][b] = table
        tables[b][a] = table.T
    return costs, tables
