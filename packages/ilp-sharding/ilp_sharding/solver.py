"""`solve`: from a problem to a choice with a proven bound.

    problem --Instance.of--> arrays --Network.reduce--> smaller graph --> direct --> expanded choice

The answer is any-time: whatever was found and proved by the deadline is returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from alpa_interchange.selection import ShardingProblem, ShardingSolution
from ilp_sharding.choice.first_choice import consistent_start, greedy_start, repaired_choice
from ilp_sharding.compiled_loops import ready
from ilp_sharding.evaluation import check
from ilp_sharding.exact.elimination import Elimination, OutOfTime
from ilp_sharding.methods.direct import (
    DENSE_SECONDS,
    DENSE_USAGE,
    ELIMINATION_SECONDS,
    ELIMINATION_WORK,
    PROGRAM_SECONDS,
    Search,
    binding_rows,
    exact_memory,
    program_tables,
    prove_infeasible,
    solve_direct,
    table_entries,
)
from ilp_sharding.methods.narrowing import NARROWING_TABLES, narrow, needed_loops
from ilp_sharding.methods.numpy_sweeps import swept_start
from ilp_sharding.methods.rounds import search_rounds
from ilp_sharding.options import Progress, SolveOptions
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network, NoAssignment
from ilp_sharding.workers.pool import WorkerPool

SOLVER = "ilp-sharding 0.1.0"
LARGE_NODES = 5000  # from here on, or from
LARGE_TABLES = 2e7  # table entries on, workers start while the problem is still being reduced
WORKER_SECONDS = 1.5  # that a worker process needs before it finds anything
FIRST_SECONDS = 0.01  # that the greedy pass may take whatever the deadline
GRAPH_SECONDS = 4e-6  # per node and edge, to begin a reduction
REDUCTION_SECONDS = 1.5e-5  # and to do it
FIRST_SHARE = 0.2  # of the time, that the reduction may take before a first choice is looked for
SWEEP_SECONDS = 1.0  # for sweeps in numpy where worker processes follow

CUT_SECONDS = 4e-8  # per table entry, to forbid what the first choice excludes,
NARROWING_SECONDS = 3e-7  # and to make narrow

QUICK_WORK = 1e6  # table entries of an elimination that is as quick as a first choice
LIMITED_TABLES = 5e5  # table entries up to which `narrow` is tried with a memory limit,
LIMITED_SHARE = 0.5  # for this share of the time,
FREE_SHARE = 0.2  # and this share of that without the limit
PROGRAM_NODES = 1000  # of the tree of an integer program, where rounds are counted, not seconds
ROUNDS = 100  # of a search in this process before workers start, if time does not end it


def solve(problem: ShardingProblem, options: SolveOptions | None = None) -> ShardingSolution:
    """Return the best choice found for `problem`, with a proven lower bound and status.

    Status: "optimal" (proved), "feasible", "infeasible" (proved: by forbidden entries, then
    `smallest_memory` is None, or by memory, then it is the least limit with an answer if that was
    found in time) or "timed_out" (no choice found by the deadline, nothing proved).
    """
    options = options or SolveOptions()
    began = time.perf_counter()
    instance = Instance.of(problem, options)
    search = _search(problem, instance, options, began)
    if instance.huge_floor < max(search.lower_bound, search.objective) or search.infeasible:
        exact = Instance.of(problem, options, forbid_huge=False)
        if math.isfinite(instance.huge_floor):
            search = _search(problem, exact, options, began)
    return _solution(problem, search, began)


def pin_cost(
    problem: ShardingProblem,
    pins: dict[int, int],
    options: SolveOptions | None = None,
) -> tuple[float, float]:
    """Return (least, most) that fixing `pins` adds to the optimal cost; equal when both are proved.

    `inf` where the pins leave no choice. The interval comes from the bounds of two solves.
    """
    options = options or SolveOptions()
    free = solve(problem, options)
    fixed = solve(problem, evolve(options, pins={**options.pins, **pins}))
    if free.objective is None or free.lower_bound is None:
        raise ValueError("pin_cost needs a problem with an answer; without pins none was found")
    if fixed.status == "infeasible":
        return math.inf, math.inf
    most = math.inf if fixed.objective is None else fixed.objective - free.lower_bound
    least = 0.0 if fixed.lower_bound is None else max(0.0, fixed.lower_bound - free.objective)
    return least, most


def _search(
    problem: ShardingProblem, instance: Instance, options: SolveOptions, began: float
) -> Search:
    search = Search(
        instance=instance,
        until=began + options.deadline - _closing_seconds(instance, options.deadline),
        gap_tolerance=options.gap_tolerance,
        seed=options.seed,
        max_nodes=None if options.rounds is None else PROGRAM_NODES,
    )
    if options.progress is not None:
        callback = options.progress

        def report(phase: str) -> None:
            objective = search.objective if search.choice is not None else None
            callback(
                Progress(
                    seconds=time.perf_counter() - began,
                    objective=objective,
                    lower_bound=search.lower_bound,
                    phase=phase,
                )
            )

        search.report = report
    first = search.until if options.deadline >= FIRST_SECONDS else began + FIRST_SECONDS
    with WorkerPool(options.num_workers, options.seed) as workers:
        try:
            if _large(instance) and search.seconds > WORKER_SECONDS and options.rounds is None:
                workers.start(search.seconds)
            if options.warm_start is not None:
                _offer_repaired(instance, search, options.warm_start, first)
            # while workers load, the reduction comes first, if there is time enough for both
            later = workers.started and _reduction_seconds(instance) < FIRST_SHARE * search.seconds
            if not later:
                _offer_first(instance, search, first)
            if not search.closed:
                _solve_reduced(instance, search, options, workers, later)
        except NoAssignment:
            if search.choice is None:
                search.infeasible = True
            else:
                search.raise_bound(search.objective, "reduction")
        except OutOfTime:
            pass
    return search


def _offer_repaired(
    instance: Instance, search: Search, previous: Sequence[int], until: float
) -> None:
    """Offer the choice `previous`, repaired."""
    repaired = repaired_choice(instance, previous, until)
    if repaired is not None:
        search.offer(repaired, "start")


def _offer_first(instance: Instance, search: Search, until: float) -> None:
    """Offer the choice and bound of a pass over the nodes."""
    start, bound, impossible = greedy_start(instance, until)
    search.infeasible = impossible and exact_memory(instance)
    if bound == math.inf:
        raise NoAssignment
    if start is not None:
        search.offer(start, "start")
    search.raise_bound(bound, "start")


def _reduction_seconds(instance: Instance) -> float:
    """Return about how long the reductions take."""
    ends = instance.num_nodes + len(instance.edges)
    return REDUCTION_SECONDS * ends + CUT_SECONDS * len(instance.table)


def _large(instance: Instance) -> bool:
    return instance.num_nodes > LARGE_NODES or len(instance.table) > LARGE_TABLES


def _closing_seconds(instance: Instance, deadline: float) -> float:
    """Return the seconds to keep for the final check of the answer."""
    if math.isinf(deadline):
        return 0.0
    return min(0.1 * deadline, 2e-6 * (instance.num_nodes + len(instance.edges)))


def _solve_reduced(
    instance: Instance, search: Search, options: SolveOptions, workers: WorkerPool, later: bool
) -> None:
    """Reduce and solve: directly if the graph is narrow or small, else with worker processes.

    `later`: a first choice has not been looked for.
    """
    if search.seconds < GRAPH_SECONDS * (instance.num_nodes + len(instance.edges)):
        raise OutOfTime
    large = _large(instance)
    if CUT_SECONDS * len(instance.table) < 0.1 * search.seconds:
        instance = instance.without(search.objective)
    network = Network(instance)
    network.reduce(search.until)
    if search.late:
        raise OutOfTime
    nodes = network.open_nodes()
    sizes = {i: len(network.cost[i]) for i in nodes}
    elimination = Elimination(nodes, sizes, network.tables, ELIMINATION_WORK)
    if search.late:
        raise OutOfTime
    memory = MemoryProfile(instance, network) if math.isfinite(instance.limit) else None
    if search.infeasible:
        _smallest_memory(network, search, memory)
        return
    tables = table_entries(network)
    eliminable = elimination.complete
    eliminable &= ELIMINATION_SECONDS * elimination.work < search.seconds
    if search.choice is None and not large:
        if memory is not None or not eliminable or elimination.work > QUICK_WORK:
            _first_choice(network, search, memory)
    dense = 0.0 if memory is None else memory.num_times * float(memory.offset[-1])
    program = tables < program_tables(memory) and PROGRAM_SECONDS * tables < search.seconds
    direct = dense < DENSE_USAGE and DENSE_SECONDS * dense < search.seconds
    if (eliminable or program) and direct:
        if later:  # the time may end before the program does
            _offer_first(instance, search, search.until)
            later = False
        if solve_direct(network, search, elimination if eliminable else None, memory):
            return
        if memory is not None:
            memory = MemoryProfile(instance, network)
    alone = memory is None or search.seconds < WORKER_SECONDS  # no workers would follow
    alone |= options.rounds is not None
    small = tables < (NARROWING_TABLES if alone else LIMITED_TABLES)
    if not workers.started and tables < NARROWING_TABLES and dense < DENSE_USAGE:
        inside = NARROWING_SECONDS * tables < search.seconds
        if not (inside and ready(search.seconds, *needed_loops(memory))):
            _swept(network, search, memory)
        elif small and (
            _narrowed(network, search, memory) or _searched_here(network, search, memory)
        ):
            _smallest_memory(network, search, memory)
            return
    if options.rounds is not None:
        try:
            search_rounds(network, memory, search, options.rounds)
        except NoAssignment:
            search.infeasible = search.choice is None
            search.raise_bound(search.objective, "search")
        _smallest_memory(network, search, memory)
        return
    if not workers.started and search.seconds < WORKER_SECONDS:
        return
    workers.start(search.seconds)
    workers.hand_over(network, memory, search)
    if later:
        _offer_first(instance, search, search.until)
    workers.collect(network, search)
    _smallest_memory(network, search, memory)


def _smallest_memory(network: Network, search: Search, memory: MemoryProfile | None) -> None:
    """Find the least limit with an answer, if there is none and time is left."""
    if not search.infeasible or memory is None or search.late:
        return
    if memory.num_times * float(memory.offset[-1]) < DENSE_USAGE:
        tolerance = 0.0 if exact_memory(search.instance) else memory.tolerance()
        usage, slack = binding_rows(memory, tolerance)
        prove_infeasible(network, search, network.open_nodes(), usage, slack)


def _first_choice(network: Network, search: Search, memory: MemoryProfile | None) -> None:
    """Offer the choice that `consistent_start` finds, if it finds one."""
    chosen = consistent_start(network, memory, search.until)
    if chosen is not None:
        search.offer(network.expand(chosen), "start")


def _swept(network: Network, search: Search, memory: MemoryProfile | None) -> None:
    """Sweep in numpy: until the deadline, or for a moment where worker processes follow."""
    until = search.until
    if search.seconds > WORKER_SECONDS:
        until = time.perf_counter() + min(SWEEP_SECONDS, 0.2 * search.seconds)
    swept_start(network, search, memory, until)


def _narrowed(network: Network, search: Search, memory: MemoryProfile | None) -> bool:
    """Return whether `narrow` solved the problem; where memory may bind, in a share of the time."""
    until, seconds = search.until, search.seconds
    if memory is not None and math.isfinite(seconds) and LIMITED_SHARE * seconds > WORKER_SECONDS:
        search.until = until - (1.0 - LIMITED_SHARE) * seconds
    try:
        if memory is not None and _free_optimum_fits(network, search, memory):
            return True
        return narrow(network, search, memory)
    except OutOfTime:
        return False
    finally:
        search.until = until


def _searched_here(network: Network, search: Search, memory: MemoryProfile | None) -> bool:
    """Return whether rounds in this process end the search in less time than workers take to
    load."""
    if search.max_nodes is not None or search.seconds < 2.0 * WORKER_SECONDS:
        return False
    until = search.until
    search.until = time.perf_counter() + WORKER_SECONDS
    try:
        search_rounds(network, memory, search, ROUNDS)
    except NoAssignment:
        search.infeasible = search.choice is None
        search.raise_bound(search.objective, "search")
    finally:
        search.until = until
    return search.closed or search.infeasible


def _free_optimum_fits(network: Network, search: Search, memory: MemoryProfile) -> bool:
    """Return whether the optimum without the limit keeps it, and so is the answer to `search`.

    Its cost is a bound in any case.
    """
    free = Search(
        instance=evolve(search.instance, limit=math.inf),
        until=time.perf_counter() + FREE_SHARE * search.seconds,
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
    tolerance = 0.0 if exact_memory(search.instance) else memory.tolerance()
    if (usage > memory.slack + tolerance).any():
        return False
    search.offer(free.choice, "narrowing")
    search.raise_bound(search.objective, "narrowing")
    return True


def _solution(problem: ShardingProblem, search: Search, began: float) -> ShardingSolution:
    choice = search.choice
    objective: float | None = None
    bound: float | None = search.lower_bound if math.isfinite(search.lower_bound) else None
    smallest = None
    if choice is not None:
        evaluation = check(problem, choice.tolist())
        if not evaluation.feasible:
            raise AssertionError("the solver's answer breaks a limit; please report the problem")
        objective = float(evaluation.cost)
        if search.closed and search.gap_tolerance == 0.0:
            bound = objective
        elif bound is not None:
            bound = min(bound, objective)
        status = "optimal" if bound is not None and objective <= bound else "feasible"
    elif search.infeasible:
        status, smallest, bound = "infeasible", search.smallest_memory, None
    else:
        status = "timed_out"
    return ShardingSolution(
        choice=None if choice is None else tuple(choice.tolist()),
        objective=objective,
        lower_bound=bound,
        status=status,
        seconds=time.perf_counter() - began,
        smallest_memory=smallest,
        solver=SOLVER,
    )
