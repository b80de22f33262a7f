"""Solves a stage's selection problem so that its memory peak stays under a limit.

Prices on memory give a choice that fits, a bound and the times that matter (`priced_memory`).
Rows are then made lazily: solve, find where memory peaks under the answer, forbid more than the
limit at that time, and solve again until the peak fits. Every problem on the way asks for less than
all times together, so its bound is a bound of the whole, and if it has no answer, there is none.
Copies too small to be part of a problem may still break the limit: then the excess is reserved at
that time, and the bound stays that of the last problem without reserved bytes.
"""

from __future__ import annotations

import math
import time

from attrs import evolve

import ilp_sharding
from alpa_interchange import ShardingProblem, ShardingSolution
from alpa_meta.intra_op.coarse_solution import CLOSE, LARGE, Classes, solve_coarsely
from alpa_meta.intra_op.memory_profile import extended_choice, limited_problem
from alpa_meta.intra_op.priced_memory import PricedMemory
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options

ROUNDS = 12  # of adding a time or reserving more; few are ever needed
PRICING_SHARE = 0.3  # of the time, at most, for prices
# Without a time, work is counted in table entries, of which a sweep visits each. The numbers are
# estimates, not fitted: small problems are proven long before, and gpt large on 8x8 devices with
# 70 GB takes 17 CPU s with them (`benchmarks/planning_time.py --model gpt --memory 70e9`).
SWEPT_ENTRIES, PRICED_ENTRIES = 4e7, 3e7
# Where a choice may be off by a tolerance, it is the least: bounds of rows are not asked for. With
# 15 of 60 rounds MoE-10B on 2 x 8 V100 has the same plan and bound, in 50 instead of 42 CPU s.
MOST_ROUNDS, LEAST_ROUNDS = 60, 3
# Of a problem with prices or rows: the choices that they find are counted exactly. LLaMA-8B on 8
# H100 takes 5.9654 instead of 5.9648 s a step, its last problem 0.4 instead of 2.5 CPU s.
TOLERANCE = 1e-3


def solve(
    problem: ShardingProblem,
    options: Options,
    seconds: float = math.inf,
    start: tuple[int, ...] | None = None,
    classes: Classes | None = None,
    tolerance: float = 0.0,
    bound_only: bool = False,
) -> ShardingSolution:
    """Return the solution of a selection problem, to within a relative `tolerance`; where its
    choice is of no use (`bound_only`), a worse one that has the same bound but for its last digits.

    It is found in `seconds` or less, if `Options.solver_seconds` are given; else by as much work as
    its size allows.

    A large problem is solved by `classes` of alike strategies, if there are any.
    """
    seconds = min(_seconds(options), seconds)
    if classes is not None and problem.edge_cost.size > LARGE:
        until = time.perf_counter() + seconds

        def part(smaller: ShardingProblem, seconds: float) -> ShardingSolution:
            return solve(smaller, options, seconds, tolerance=tolerance)

        return solve_coarsely(problem, classes, part, until, max(CLOSE, tolerance))
    return ilp_sharding.solve(
        problem,
        ilp_sharding.SolveOptions(
            deadline=max(seconds, 0.0),
            rounds=None
            if options.solver_seconds is not None
            else LEAST_ROUNDS
            if tolerance
            else _rounds(problem, SWEPT_ENTRIES),
            gap_tolerance=tolerance,
            seed=options.seed,
            warm_start=start,
            bound_only=bound_only,
        ),
    )


def _seconds(options: Options) -> float:
    return math.inf if options.solver_seconds is None else options.solver_seconds


def _rounds(problem: ShardingProblem, entries: float) -> int:
    """Return the rounds that visit so many table entries in all."""
    return int(max(LEAST_ROUNDS, min(MOST_ROUNDS, entries / max(problem.edge_cost.size, 1))))


def solve_within(
    selection: Selection,
    options: Options,
    limit: float | None,
    free: ShardingSolution | None = None,
) -> ShardingSolution:
    """Return the solution whose memory peak is at most `limit` bytes, None for no limit.

    `free` is the solution without a limit, if it is known. The search under a limit ends after
    `Options.solver_seconds`, if given, with the best choice known to fit. An infeasible solution
    has the least limit that would do as `smallest_memory`, or what is proved of it from below.
    """
    began = time.perf_counter()
    found = free or solve(selection.problem, options, classes=selection.classes)
    if limit is None or found.choice is None:
        return found
    if selection.memory.peak(found.choice).total > limit:
        found = _limited(selection, options, limit, found)
    return evolve(found, seconds=time.perf_counter() - began)


def _limited(
    selection: Selection, options: Options, limit: float, free: ShardingSolution
) -> ShardingSolution:
    """Return the solution under a limit that the solution `free` breaks."""
    problem, memory = selection.problem, selection.memory
    until = time.perf_counter() + _seconds(options)

    def left() -> float:
        return until - time.perf_counter()

    def priced_solution(priced: ShardingProblem) -> ShardingSolution:
        return solve(priced, options, left(), classes=selection.classes, tolerance=TOLERANCE)

    priced = PricedMemory(problem, memory, limit, priced_solution)
    priced.search(
        free,
        time.perf_counter() + PRICING_SHARE * _seconds(options),
        _rounds(problem, PRICED_ENTRIES),
    )
    if priced.least_peak > limit:
        return _without_choice(free, "infeasible", priced.least_peak)
    choice, objective = priced.choice, priced.objective
    bound = max(free.lower_bound or 0.0, priced.lower_bound)
    reserved = dict.fromkeys(priced.times, 0.0)
    large = selection.classes is not None and problem.edge_cost.size > LARGE
    for _ in range(0 if large else ROUNDS):
        plain = not any(reserved.values())
        rows = limited_problem(problem, memory, reserved, limit)
        start = choice and extended_choice(problem, memory, reserved, limit, choice)
        found = solve(rows, options, left(), start, tolerance=TOLERANCE)
        if plain and found.status == "infeasible":
            return _without_choice(free, "infeasible", found.smallest_memory)
        if plain:
            bound = max(bound, found.lower_bound or 0.0)
        if found.choice is None or found.objective is None:
            break
        candidate = found.choice[: problem.num_nodes]
        peak = memory.peak(candidate)
        if peak.total <= limit:
            if found.objective < objective:
                choice, objective = candidate, found.objective
            break
        reserved[peak.time] = reserved.get(peak.time, 0.0) + (
            peak.total - limit if peak.time in reserved else 0.0
        )
    if choice is None:
        return _without_choice(free, "timed_out", None)
    bound = min(bound, objective)
    status = "optimal" if objective <= bound else "feasible"
    return evolve(free, choice=choice, objective=objective, lower_bound=bound, status=status)


def _without_choice(
    free: ShardingSolution, status: str, smallest: float | None
) -> ShardingSolution:
    return evolve(
        free, choice=None, objective=None, lower_bound=None, status=status, smallest_memory=smallest
    )
