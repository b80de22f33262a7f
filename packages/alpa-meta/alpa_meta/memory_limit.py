"""Solves a stage's selection problem so that its memory peak stays under a limit.

Rows are made lazily: solve, find where memory peaks under the answer, forbid more than the limit
at that time, and solve again until the peak fits. Every problem on the way asks for less than all
times together, so its bound is a bound of the whole, and if it has no answer, there is none.
Copies too small to be part of a problem may still break the limit: then the excess is reserved at
that time, and the bound stays that of the last problem without reserved bytes.
"""

from __future__ import annotations

from attrs import evolve

import ilp_sharding
from alpa_interchange import ShardingProblem, ShardingSolution
from alpa_meta.intra_op import Selection
from alpa_meta.memory_profile import limited_problem
from alpa_meta.options import Options

ROUNDS = 12  # of adding a time or reserving more; few are ever needed


def solve(problem: ShardingProblem, options: Options) -> ShardingSolution:
    """Return the solution of a selection problem."""
    return ilp_sharding.solve(
        problem, ilp_sharding.SolveOptions(deadline=options.solver_seconds, seed=options.seed)
    )


def solve_within(
    selection: Selection,
    options: Options,
    limit: float | None,
    free: ShardingSolution | None = None,
) -> ShardingSolution:
    """Return the solution whose memory peak is at most `limit` bytes, None for no limit.

    `free` is the solution without a limit, if it is known. An infeasible solution has the least
    limit that would do as `smallest_memory`, where known.
    """
    problem = selection.problem
    found = free or solve(problem, options)
    if limit is None or found.choice is None:
        return found
    seconds = 0.0 if free else found.seconds
    bound, reserved = found.lower_bound, dict[int, float]()
    excess = 0.0
    for _ in range(ROUNDS):
        assert found.choice is not None
        peak = selection.memory.peak(found.choice)
        excess = peak.total - limit
        if excess <= 0:
            if bound is None or found.objective is None:
                return evolve(found, seconds=seconds)
            bound = min(bound, found.objective)
            status = "optimal" if found.objective <= bound else "feasible"
            return evolve(found, lower_bound=bound, status=status, seconds=seconds)
        if peak.time in reserved:
            reserved[peak.time] += excess
        else:
            reserved[peak.time] = 0.0
        limited = solve(limited_problem(problem, selection.memory, reserved, limit), options)
        seconds += limited.seconds
        if limited.choice is None:
            least = limited.smallest_memory
            return evolve(limited, seconds=seconds, smallest_memory=least)
        if not any(reserved.values()):
            bound = limited.lower_bound
        found = evolve(limited, choice=limited.choice[: problem.num_nodes])
    return evolve(
        found,
        choice=None,
        objective=None,
        lower_bound=None,
        status="infeasible",
        smallest_memory=limit + excess,
        seconds=seconds,
    )
