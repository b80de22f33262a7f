"""Solves a selection problem whose collectives travel in buckets.

A choice costs what the problem says, where a tensor pays its share of a bucket, and what its
buckets cost beyond the shares (`BucketedTraffic.extra`), which no sum over nodes and edges can say.
Where the second part matters, the problem in which every tensor travels alone is solved too:

    choice    the better of the two by what its buckets cost
    bound     a choice that sends nothing in buckets costs the same in both problems, at least the
              bound of the second; any other at least the bound of the first and one bucket more
"""

from __future__ import annotations

import itertools
import math

from attrs import evolve

from alpa_interchange import ShardingSolution
from alpa_meta.intra_op import Selection
from alpa_meta.memory_limit import solve
from alpa_meta.mesh_costs import MeshCosts
from alpa_meta.options import Options
from cost_model.collective import BUCKET_BYTES

WORTH_SOLVING = 0.02  # of the seconds: below, what buckets cost beyond the shares decides nothing
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def solve_in_buckets(selection: Selection, options: Options) -> ShardingSolution:
    """Return the solution of a stage without a memory limit, its objective by its buckets."""
    found = solve(selection.problem, options)
    if found.choice is None or found.objective is None:
        return found
    extra = sum(selection.traffic.extra(found.choice).values())
    shared = evolve(found, objective=found.objective + extra)
    if extra <= WORTH_SOLVING * found.objective:
        return evolve(shared, status=_status(shared))
    alone = solve(selection.alone, options)
    seconds = found.seconds + alone.seconds
    best, bound = shared, found.lower_bound
    if alone.choice is not None:
        problem_seconds = _objective(selection, alone.choice)
        exact = problem_seconds + sum(selection.traffic.extra(alone.choice).values())
        if shared.objective is not None and exact < shared.objective:
            best = evolve(shared, choice=alone.choice, objective=exact)
    if bound is not None and alone.lower_bound is not None:
        bound = min(alone.lower_bound, bound + least_extra(selection))
        bound = max(bound, found.lower_bound or 0.0)
    best = evolve(best, lower_bound=bound, seconds=seconds)
    return evolve(best, status=_status(best))


def least_extra(selection: Selection) -> float:
    """Return seconds by which the buckets of any choice that has some exceed their shares.

    f(T) - T / B f(B) is concave in the bytes T of a bucket, so it is least at the ends of their
    range: at nothing, and at all tensors together.
    """
    costs, total = selection.costs, selection.traffic.most_bytes
    if total >= BUCKET_BYTES:
        return 0.0
    least = math.inf
    names = [axis.name for axis in costs.mesh.axes if axis.size > 1]
    for kind in _KINDS:
        for count in range(1, len(names) + 1):
            for axes in itertools.combinations(names, count):
                for size in (1.0, max(total, 1.0)):
                    least = min(least, _beyond_share(costs, kind, size, axes))
    return max(0.0, least) if math.isfinite(least) else 0.0


def _beyond_share(costs: MeshCosts, kind: str, size: float, axes: tuple[str, ...]) -> float:
    packed = costs.bucket_share_seconds(kind, size, axes)
    return costs.collective_seconds(kind, size, axes) - packed


def _objective(selection: Selection, choice: tuple[int, ...]) -> float:
    """Return the seconds of a choice under the problem in which tensors pay shares."""
    problem, total = selection.problem, 0.0
    start = 0
    for count, chosen in zip(problem.num_strategies, choice, strict=True):
        total += float(problem.node_cost[start + chosen])
        start += int(count)
    start = 0
    for first, second in problem.edges:
        width = int(problem.num_strategies[second])
        total += float(problem.edge_cost[start + choice[first] * width + choice[second]])
        start += int(problem.num_strategies[first]) * width
    return total


def _status(solution: ShardingSolution) -> str:
    if solution.objective is None or solution.lower_bound is None:
        return solution.status
    proven = solution.objective <= solution.lower_bound * (1 + 1e-9)
    return "optimal" if proven else "feasible"
