"""Solves a selection problem whose collectives travel in buckets.

A choice costs what the problem says, where a tensor pays its share of a bucket, and what its
buckets cost beyond the shares (`BucketedTraffic.extra`), which no sum over nodes and edges can say.
Where the second part matters, problems with other prices of what travels in buckets are solved too:
as much as alone, then what the buckets of the best choice so far cost per byte, with those that it
does not have as much as alone (slope scaling; Kim and Pardalos 1999), while that helps.

    choice    the best of them, and of those with inputs pinned as in named parallelisms, by what
              its buckets cost                                              -> _lower()
    bound     a choice that sends nothing in buckets costs the same in the first two problems, at
              least the bound of the second; any other at least that of the first and one bucket
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from attrs import evolve

from alpa_interchange import ShardingProblem, ShardingSolution
from alpa_meta.compat import Var
from alpa_meta.intra_op.memory_limit import solve
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.priced_memory import problem_cost
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.pinning import Pin
from cost_model.collective import BUCKET_BYTES

WORTH_SOLVING = 0.02  # of the seconds: below, what buckets cost beyond the shares decides nothing
HUGE = 3e7  # edge entries from which problems with other prices take too long to build
WORTH_PINNING = 5e-4  # likewise, of the seconds, for likely ways to pin inputs
ROUNDS = 4  # of prices from the best choice so far
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def solve_in_buckets(
    selection: Selection,
    options: Options,
    likely: Iterable[Mapping[Var, Pin]] = (),
    tolerance: float = 0.0,
) -> ShardingSolution:
    """Return the solution of a stage without a memory limit, its objective by its buckets.

    Each problem on the way is solved to within a relative `tolerance`.
    Where buckets matter, each of the `likely` ways to pin inputs is tried too.
    """
    found, bound = _search(selection, selection.problem, options, tolerance)
    if found.choice is None or found.objective is None:
        return found
    extra = sum(selection.traffic.extra(found.choice).values())
    seconds = found.seconds
    if extra > WORTH_PINNING * found.objective and selection.problem.edge_cost.size <= HUGE:
        for pins in likely:
            other, _ = _search(selection, pinned_problem(selection, pins), options, tolerance)
            seconds += other.seconds
            found = _lower(selection, found, other)
    found = evolve(found, lower_bound=bound, seconds=seconds)
    return evolve(found, status=_status(found))


def _search(
    selection: Selection, problem: ShardingProblem, options: Options, tolerance: float
) -> tuple[ShardingSolution, float | None]:
    """Return the solution of `problem` by its buckets, and a bound of it."""
    found = solve(problem, options, classes=selection.classes, tolerance=tolerance)
    if found.choice is None or found.objective is None:
        return found, None
    extra = sum(selection.traffic.extra(found.choice).values())
    best, bound = evolve(found, objective=found.objective + extra), found.lower_bound
    if extra <= WORTH_SOLVING * found.objective or problem.edge_cost.size > HUGE:
        return best, bound
    traffic = selection.traffic
    alone = solve(
        traffic.repriced(problem), options, classes=selection.classes, tolerance=tolerance
    )
    seconds = found.seconds + alone.seconds
    best = _lower(selection, best, alone)
    for _ in range(ROUNDS):
        assert best.choice is not None
        groups = traffic.groups(best.choice)
        prices = {
            group: traffic.beyond_shares(group, sizes) / sum(size * n for size, n in sizes.items())
            for group, sizes in groups.items()
        }
        repriced = traffic.repriced(problem, prices)
        priced = solve(
            repriced,
            options,
            start=best.choice,
            classes=selection.classes,
            tolerance=tolerance,
        )
        seconds += priced.seconds
        before, best = best, _lower(selection, best, priced)
        if best is before:
            break
    if bound is not None and alone.lower_bound is not None:
        bound = max(min(alone.lower_bound, bound + least_extra(selection)), bound)
    return evolve(best, seconds=seconds), bound


def pinned_problem(selection: Selection, pins: Mapping[Var, Pin]) -> ShardingProblem:
    """Return the problem with the values of `pins` as pinned, as far as that is possible."""
    problem = selection.problem
    first = np.concatenate([[0], np.cumsum(problem.num_strategies)])
    node_cost = problem.node_cost.copy()
    for var, pin in pins.items():
        source = selection.sources.get(var)
        if source is None or source.node is None:
            continue
        part = slice(first[source.node], first[source.node + 1])
        allowed = [pin.allows(spec) for spec in source.specs]
        cost = np.where(allowed, node_cost[part], math.inf)
        if np.isfinite(cost).any():
            node_cost[part] = cost
    return evolve(problem, node_cost=node_cost)


def _lower(
    selection: Selection, best: ShardingSolution, other: ShardingSolution
) -> ShardingSolution:
    """Return `best`, or with the choice of `other` where that costs less by its buckets."""
    if other.choice is None or best.objective is None:
        return best
    exact = problem_cost(selection.problem, other.choice)
    exact += sum(selection.traffic.extra(other.choice).values())
    if exact >= best.objective * (1 - 1e-9):
        return best
    return evolve(best, choice=other.choice, objective=exact)


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


def _status(solution: ShardingSolution) -> str:
    if solution.objective is None or solution.lower_bound is None:
        return solution.status
    proven = solution.objective <= solution.lower_bound * (1 + 1e-9)
    return "optimal" if proven else "feasible"
