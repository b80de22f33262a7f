"""`solve`: from a problem to a choice with a proven bound.

    problem --Instance.of--> arrays --Network.reduce--> smaller graph --methods--> expanded choice

The answer is any-time: whatever was found and proved by the deadline is returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from importlib.metadata import version

from attrs import evolve

from alpa_interchange.selection import ShardingProblem, ShardingSolution
from ilp_sharding.choice.first_choice import repaired_choice
from ilp_sharding.evaluation import check
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exceptions import NoAssignment, OutOfTime
from ilp_sharding.methods.direct import ELIMINATION_WORK
from ilp_sharding.methods.narrowing import solve_unreduced
from ilp_sharding.methods.reduced import Reduced, is_large, offer_start
from ilp_sharding.methods.table import apply_methods
from ilp_sharding.options import Progress, SolveOptions
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search
from ilp_sharding.workers.pool import WORKER_SECONDS, WorkerPool

SOLVER = f"ilp-sharding {version('ilp-sharding')}"
FIRST_SECONDS = 0.01  # that the greedy pass may take whatever the deadline
GRAPH_SECONDS = 4e-6  # per node and edge, to begin a reduction
REDUCTION_SECONDS = 1.5e-5  # and to do it
CUT_SECONDS = 4e-8  # per table entry, to forbid what the first choice excludes
FIRST_SHARE = 0.2  # of the time, that the reduction may take before a first choice is looked for
PROGRAM_NODES = 1000  # of the tree of an integer program, where rounds are counted, not seconds


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
        bound_only=options.bound_only,
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
            if is_large(instance) and search.seconds > WORKER_SECONDS and options.rounds is None:
                workers.start(search.seconds)
            if options.warm_start is not None:
                _offer_repaired(instance, search, options.warm_start, first)
            if not workers.started and solve_unreduced(instance, search):
                return search
            # while workers load, the reduction comes first, if there is time enough for both
            wait = workers.started and _reduction_seconds(instance) < FIRST_SHARE * search.seconds
            if not wait:
                offer_start(instance, search, first)
            if not search.closed:
                _solve_reduced(instance, search, options, workers, has_start=not wait)
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


def _reduction_seconds(instance: Instance) -> float:
    """Return about how long the reductions take."""
    ends = instance.num_nodes + len(instance.edges)
    return REDUCTION_SECONDS * ends + CUT_SECONDS * len(instance.table)


def _closing_seconds(instance: Instance, deadline: float) -> float:
    """Return the seconds to keep for the final check of the answer."""
    if math.isinf(deadline):
        return 0.0
    return min(0.1 * deadline, 2e-6 * (instance.num_nodes + len(instance.edges)))


def _solve_reduced(
    instance: Instance,
    search: Search,
    options: SolveOptions,
    workers: WorkerPool,
    *,
    has_start: bool,
) -> None:
    """Reduce the problem and give it to the methods; `has_start`: a first choice was looked for."""
    if search.seconds < GRAPH_SECONDS * (instance.num_nodes + len(instance.edges)):
        raise OutOfTime
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
    reduced = Reduced(
        instance=instance,
        network=network,
        search=search,
        memory=memory,
        elimination=elimination,
        workers=workers,
        rounds=options.rounds,
        has_start=has_start,
    )
    if search.infeasible:
        reduced.find_smallest_memory()
    else:
        apply_methods(reduced)


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
        if search.proved:
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
