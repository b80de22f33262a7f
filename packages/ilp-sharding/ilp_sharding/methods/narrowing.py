"""Wide graphs made narrow by message bounds, in this process.

Without memory rows that is done by compiled sweeps that drop strategies on the way -> pruned. With
them, messages under multipliers (see `dual_ascent`) give a bound B and a reduced cost r_v of every
strategy v: each choice that uses v costs at least B + r_v. For any guess C of the optimum the
strategies with B + r_v > C may be left out; let v(C) be the optimum of what is left. Every choice
left out costs more than C, so

    v(C) <= C  =>  v(C) is the optimum;          else  the optimum > C, and v(C) is a choice's cost.

The guesses rise from just above B, where little is left, until that holds or what is left is too
large for elimination or HiGHS -> narrow().
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ilp_sharding.compiled_loops import load, ready
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exact.memory_elimination import TooManyLabels, limited_minimum
from ilp_sharding.exceptions import NoAssignment, OutOfTime
from ilp_sharding.methods.direct import (
    ELIMINATION_SECONDS,
    ELIMINATION_WORK,
    PROGRAM_SECONDS,
    PROGRAM_TABLES,
)
from ilp_sharding.methods.reduced import Reduced
from ilp_sharding.problem.flat_graph import TableGraph, instance_graph, table_graph
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import DENSE_USAGE, MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search
from ilp_sharding.workers.pool import WORKER_SECONDS

if TYPE_CHECKING:
    from ilp_sharding.bound.dual_ascent import DualAscent

Expand = Callable[[np.ndarray], np.ndarray]  # labels [base nodes] of a graph -> the whole choice

NARROWING_TABLES = 2e7  # table entries up to which sweeps in this process are quick
NARROWING_SECONDS = 3e-7  # per table entry
_UNREDUCED_SECONDS = 1.0  # of time that must be left to begin before a first choice is known,
_UNREDUCED_SHARE = 0.2  # and the share of it, if there is a deadline
# Edges per node from which on messages come first. Chains with some residual edges (1.1 per node,
# `benchmarks/ilp_sharding_contest.py`) are eliminated in 25 ms where messages take 180 ms; problems
# of planning have 1.4 and are not eliminated.
_CYCLIC = 1.25
_WORTHWHILE = 0.8  # of the entries: the share that reductions must leave at most for another try
_LIMITED_TABLES = 5e5  # table entries up to which `narrow` is tried with a memory limit,
_LIMITED_SHARE = 0.5  # for this share of the time,
_FREE_SHARE = 0.2  # and this share of that without the limit
_GUESSES = (1e-9, 1e-5, 1e-3, 4e-3, 1.6e-2)  # relative rise over the bound
_FEW_STRATEGIES = (
    1000  # the first guess leaves no more, where memory keeps the bound from being met
)
_LABEL_WORK = 3e5  # table entries of an elimination with labels,
_LABELS = 1e6  # labels times rows of all steps together
_MULTIPLES = np.array([[0.5], [0.8], [1.0], [1.25], [2.0]])  # of the multipliers that bound labels
_REST_WORK = 2e8  # table entries of an elimination of what is left
_MORE, _FEW_TABLES = 1.3, 1000  # how much larger a last step may be than the next one
_STEPS = 400  # of multipliers with them
_POLISH = 100  # ball moves of a first choice, and
_POLISH_SECONDS = 0.1  # what must be left for them
_SWEPT_TABLES = 4e8  # table entries all sweeps together may visit where memory binds


def needed_loops(memory: MemoryProfile | None) -> tuple[str, ...]:
    """Return the modules whose compiled loops `narrow` calls."""
    if memory is None:
        return ("bound.pruned_sweeps",)
    return (
        "bound.messages",
        "exact.elimination_loops",
        "problem.graph_loops",
        "bound.dominance",
        "choice.forest_moves",
        "choice.ball_minimisation",
    )


def sweeps_fit(reduced: Reduced) -> bool:
    """Return whether the problem is one for sweeps in this process, compiled or not."""
    return (
        not reduced.workers.started
        and reduced.entries < NARROWING_TABLES
        and reduced.usage < DENSE_USAGE
    )


def loops_in_time(reduced: Reduced) -> bool:
    """Return whether the compiled sweeps can be loaded, and end, before the deadline."""
    seconds = reduced.search.seconds
    return NARROWING_SECONDS * reduced.entries < seconds and ready(
        seconds, *needed_loops(reduced.memory)
    )


def narrowing_seconds(reduced: Reduced) -> float:
    """Return about how long `solve_narrowed` takes, inf if the problem is not for it."""
    search = reduced.search
    # where worker processes may follow, they get the larger problems with memory rows
    alone = reduced.memory is None or search.seconds < WORKER_SECONDS
    alone |= reduced.rounds is not None
    largest = NARROWING_TABLES if alone else _LIMITED_TABLES
    if not sweeps_fit(reduced) or reduced.entries >= largest or not loops_in_time(reduced):
        return math.inf
    return NARROWING_SECONDS * reduced.entries


def solve_unreduced(instance: Instance, search: Search) -> bool:
    """Return whether messages solve `instance` as it is, in little of the time, or bound it where
    only that is wanted; not under memory.

    Planner problems lose next to nothing by the reductions: their equal layers are folded already.
    Of 586 problems of one planning (up to 366 nodes and 180,000 table entries), reductions, a first
    choice and an elimination order took more CPU time than the messages.
    """
    seconds = max(_UNREDUCED_SECONDS, NARROWING_SECONDS * len(instance.table))
    if math.isfinite(instance.limit) or seconds > search.seconds:
        return False
    if len(instance.edges) <= _CYCLIC * instance.num_nodes:
        return False
    if len(instance.table) > NARROWING_TABLES or not ready(search.seconds, *needed_loops(None)):
        return False
    load(*needed_loops(None))
    graph = instance_graph(instance)
    search.narrowed_entries = len(graph.tables.entry)
    until = search.until
    search.until = min(until, time.perf_counter() + _UNREDUCED_SHARE * search.seconds)
    try:
        solved = narrow_graph(graph, lambda labels: labels, search, instance.axis_bits)
        return solved or (search.bound_only and search.choice is not None)
    except OutOfTime:
        return False
    finally:
        search.until = until


def solve_narrowed(reduced: Reduced) -> bool:
    """Return whether `narrow` solved the problem; where memory may bind, in a share of the time."""
    network, search, memory = reduced.network, reduced.search, reduced.memory
    if memory is None and reduced.entries > _WORTHWHILE * search.narrowed_entries:
        return False
    until, seconds = search.until, search.seconds
    if memory is not None and math.isfinite(seconds) and _LIMITED_SHARE * seconds > WORKER_SECONDS:
        search.until = until - (1.0 - _LIMITED_SHARE) * seconds
    try:
        fits = memory is not None and _free_optimum_fits(network, search, memory)
        done = fits or narrow(network, search, memory)
    except OutOfTime:
        return False
    finally:
        search.until = until
    if done:
        reduced.find_smallest_memory()
    return done


def _free_optimum_fits(network: Network, search: Search, memory: MemoryProfile) -> bool:
    """Return whether the optimum without the limit keeps it, and so is the answer to `search`.

    Its cost is a bound in any case.
    """
    free = Search(
        instance=evolve(search.instance, limit=math.inf),
        until=time.perf_counter() + _FREE_SHARE * search.seconds,
        seed=search.seed,
        programs=False,
    )
    try:
        done = narrow(network, free, None)
    except OutOfTime:
        done = False
    search.raise_bound(free.lower_bound, "narrowing")
    if not done or free.choice is None:
        return False
    positions = [np.searchsorted(network.kept[i], free.choice[i]) for i in memory.nodes]
    usage = memory.usage(memory.indicator(np.array(positions, dtype=np.int64)))
    if (usage > memory.allowed()).any():
        return False
    search.offer(free.choice, "narrowing")
    search.raise_bound(search.objective, "narrowing")
    return True


def narrow(network: Network, search: Search, memory: MemoryProfile | None) -> bool:
    """Solve the reduced `network` into `search` if messages leave little of it; return whether.

    `memory` is None if no limit binds. Otherwise the caller has a bound and often a choice, and the
    same problem to go on with.
    """
    load(*needed_loops(memory))
    base = table_graph(network, memory)
    graph = _restricted(base, np.ones(base.num_strategies, bool)) if memory is not None else base
    if graph is None:  # memory leaves no choice
        search.infeasible = search.choice is None
        search.raise_bound(search.objective, "narrowing")
        return True
    if not graph.num_nodes:
        return False
    return narrow_graph(graph, expansion(network), search)


def expansion(network: Network) -> Expand:
    """Return the function that makes a choice of `network` of labels of its table graph."""
    nodes = network.open_nodes()
    return lambda labels: network.expand(dict(zip(nodes, labels.tolist(), strict=True)))


def narrow_graph(
    graph: TableGraph, expand: Expand, search: Search, axis_bits: np.ndarray | None = None
) -> bool:
    """Return whether messages left so little of `graph` that the problem is solved. `axis_bits`
    [strategies]: the mesh axes that each uses."""
    # importing them takes a moment: not for problems that never come here
    if not graph.num_times:
        from ilp_sharding.methods.pruned import solve_pruned

        rest = solve_pruned(graph, expand, search, axis_bits)
        if rest is None:
            return True
        if search.late or not solve_rest(expand, search, rest, search.cutoff()):
            return False
        if search.choice is None:
            raise NoAssignment
        search.raise_bound(search.objective, "narrowing")
        return True
    from ilp_sharding.bound.dual_ascent import DualAscent

    affordable = int(_SWEPT_TABLES / max(len(graph.tables.entry), 1))
    return _narrowed(DualAscent(graph), min(_STEPS, affordable), expand, search)


def _narrowed(dual: DualAscent, steps: int, expand: Expand, search: Search) -> bool:
    """Return whether so many steps of `dual` leave so little that the problem is solved."""
    growing = 0.2 * search.seconds  # kept for a choice from what the steps found
    for _ in range(steps):
        dual.step(search.objective)
        if search.seconds < growing:
            break
    if dual.best == math.inf:
        raise NoAssignment
    search.raise_bound(dual.best, "messages")
    if not search.late or search.choice is None:
        _grow(expand, search, dual)
    if search.proved:
        search.raise_bound(search.objective, "messages")
        return True
    if search.late:
        return False
    pairs = dual.reduced(3)
    search.raise_bound(dual.best, "messages")
    return _guessed(dual, pairs, expand, search)


def _guessed(
    dual: DualAscent, pairs: list[tuple[float, np.ndarray]], expand: Expand, search: Search
) -> bool:
    """Return whether a guess of the optimum was proved, given (bound, reduced costs) `pairs`."""
    graph = dual.graph
    guesses = [dual.best + rise * abs(dual.best) for rise in _GUESSES]
    while len(guesses) > 1:
        if np.count_nonzero(_within(pairs, guesses[1])) > graph.num_nodes + _FEW_STRATEGIES:
            break
        guesses.pop(0)
    known, whole = math.inf, None
    for guess in guesses:
        if search.late:
            return False
        cutoff = min(guess, search.cutoff())
        rest = _restricted(graph, _within(pairs, cutoff))
        if cutoff < search.cutoff() < math.inf and not search.late:
            # where a better choice than the known one needs little more, look for that at once
            if search.cutoff() != known:
                known = search.cutoff()
                whole = _restricted(graph, _within(pairs, known))
            size = 0 if rest is None else len(rest.tables.entry)
            if whole is not None and len(whole.tables.entry) <= _MORE * size + _FEW_TABLES:
                rest, cutoff = whole, search.cutoff()
        if rest is None:
            search.raise_bound(cutoff, "narrowing")
        elif not solve_rest(expand, search, rest, cutoff, dual):
            return False
        if search.objective <= cutoff:
            search.lower_bound = search.objective
            search.report("narrowing")
        if cutoff >= search.cutoff():
            search.raise_bound(search.objective, "narrowing")
        if search.closed:
            return True
    return False


def _grow(expand: Expand, search: Search, dual: DualAscent) -> None:
    """Offer the choice decoded from the messages, repaired where it breaks a memory row."""
    from ilp_sharding.choice.construction import PrimalSearch

    primal = PrimalSearch(dual.graph, search.seed)
    polish = _POLISH if search.seconds > _POLISH_SECONDS else 0
    primal.construct(dual.decoded(), dual.price, polish=polish)
    if primal.x is not None:
        search.offer(expand(dual.graph.lift(primal.x)), "messages")


def _within(pairs: list[tuple[float, np.ndarray]], cutoff: float) -> np.ndarray:
    """Return which strategies a choice of cost at most `cutoff` may use."""
    return np.asarray(
        np.logical_and.reduce([bound + reduced <= cutoff for bound, reduced in pairs])
    )


def _restricted(graph: TableGraph, active: np.ndarray) -> TableGraph | None:
    """Return `graph` with the `active` strategies only, None if some node has none."""
    if not graph.num_nodes:
        return graph
    from ilp_sharding.bound.dominance import simplified, without_dominated

    return without_dominated(simplified(graph, active))


def solve_rest(
    expand: Expand,
    search: Search,
    rest: TableGraph,
    cutoff: float,
    dual: DualAscent | None = None,
) -> bool:
    """Offer the best choice of `rest`, raise the bound; return False if it is too large.

    `dual` has multipliers of its memory rows, if there are any.
    """
    from ilp_sharding.exact.integer_program import IntegerProgram

    sizes = dict(enumerate(np.diff(rest.tables.offset).tolist()))
    costs, tables = _as_tables(rest)
    work = _LABEL_WORK if rest.num_times else _REST_WORK
    elimination = Elimination(range(rest.num_nodes), sizes, tables, work)
    if elimination.complete and elimination.largest <= ELIMINATION_WORK:
        if ELIMINATION_SECONDS * elimination.work > search.seconds:
            return False
        try:
            value, chosen = _eliminated(rest, elimination, costs, cutoff, dual, search.until)
        except TooManyLabels:
            pass
        else:
            if value < math.inf:
                x = np.array([chosen[i] for i in range(rest.num_nodes)], dtype=np.int64)
                search.offer(expand(rest.lift(x)), "narrowing")
            if value + rest.constant > cutoff:
                search.raise_bound(cutoff, "narrowing")
            return True
    entries = len(rest.tables.entry)
    if entries > PROGRAM_TABLES or PROGRAM_SECONDS * entries > search.seconds:
        return False
    if rest.num_times * float(rest.num_strategies) > DENSE_USAGE or not search.programs:
        return False
    program = IntegerProgram.of_graph(
        rest, cutoff=cutoff, seed=search.seed, max_nodes=search.max_nodes
    )
    outcome = program.solve(search.until_hung)
    if outcome.chosen is not None:
        search.offer(expand(rest.lift(outcome.chosen)), "narrowing")
    if outcome.finished and search.objective > cutoff:
        search.raise_bound(cutoff, "narrowing")
    return outcome.finished


def _eliminated(
    rest: TableGraph,
    elimination: Elimination,
    costs: dict[int, np.ndarray],
    cutoff: float,
    dual: DualAscent | None,
    until: float,
) -> tuple[float, dict[int, int]]:
    """Return (least cost without the constant, its choice), cost inf if it is above `cutoff`."""
    rows = rest.rows
    if dual is None or not rest.num_times:
        return elimination.solve(costs, until=until)
    changes = np.zeros((rest.num_times + 1, rest.num_strategies))
    owner = np.repeat(np.arange(rest.num_strategies), np.diff(rows.start))
    np.add.at(changes, (rows.time, owner), rows.change)
    usage = np.split(np.cumsum(changes, axis=0)[:-1], rest.tables.offset[1:-1], axis=1)
    times = np.searchsorted(dual.graph.base_time, rest.base_time)
    found = limited_minimum(
        elimination,
        costs,
        dict(enumerate(usage)),
        rows.slack,
        _MULTIPLES * dual.best_multipliers[times],
        cutoff - rest.constant,
        until=until,
        most=_LABELS / rest.num_times,
    )
    return found or (math.inf, {})


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
