"""Solves large selection problems from coarse to fine.

On meshes of three or four axes an operator has up to a thousand strategies, most of which differ
only by which of several axes with equal links they use. Strategies that are alike in this way are
one class:

    coarse    node cost the least of a class, edge cost the least of two classes  -> coarse()
    bound     an optimum of the coarse problem is at most that of the whole one
    choice    the whole problem with strategies of the chosen classes only        -> restricted()

Where choice and bound differ, the chosen classes are taken apart, and both are solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from attrs import evolve

from alpa_interchange import LogicalMesh, ShardingProblem, ShardingSolution, ShardingSpec, Strategy
from alpa_meta.types import Floats, Ints

LARGE = 1e6  # edge entries from which classes are used
ROUNDS = 6  # of taking classes apart
LEAST_SECONDS = 2.0  # for the few strategies of chosen classes, so that there is a choice
CLOSE = 1e-6  # relative gap at which they end, unless the caller allows more

Classes = Sequence[Ints]
"""Per node: [strategies] number of the class."""

Solve = Callable[[ShardingProblem, float], ShardingSolution]
"""Solves a problem without a memory limit in so many seconds."""


def equal_axes(mesh: LogicalMesh) -> dict[str, int] | None:
    """Return {axis: number of its link and size} if some axes are equal in these, else None."""
    kinds = {axis.name: (axis.size, axis.bandwidth, axis.latency) for axis in mesh.axes}
    numbers: dict[Hashable, int] = {}
    found = {name: numbers.setdefault(kind, len(numbers)) for name, kind in kinds.items()}
    several = [name for name, kind in kinds.items() if kind[0] > 1]
    return found if len({found[name] for name in several}) < len(several) else None


def classes_of(choices: Sequence[ShardingSpec | Strategy], axes: dict[str, int]) -> Ints:
    """Return [choices] numbers, equal for those that differ by the use of equal axes only."""

    def kinds(names: Sequence[str]) -> tuple[int, ...]:
        return tuple(sorted(axes[name] for name in names))

    def spec_key(spec: ShardingSpec) -> Hashable:
        return tuple(map(kinds, spec.dims)), kinds(spec.partial)

    def key(choice: ShardingSpec | Strategy) -> Hashable:
        if isinstance(choice, ShardingSpec):
            return spec_key(choice)
        assigned = tuple((factor, kinds(names)) for factor, names in choice.assignment)
        return assigned, tuple(map(spec_key, choice.results))

    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key(choice), len(numbers)) for choice in choices])


def solve_coarsely(
    problem: ShardingProblem,
    classes: Classes,
    solve: Solve,
    until: float,
    close: float = CLOSE,
) -> ShardingSolution:
    """Return the best choice found until a `time.perf_counter()` or to within `close`, a relative
    gap, and the bound of the coarse problems."""
    began = time.perf_counter()
    best: ShardingSolution | None = None
    bound = -np.inf
    for _ in range(ROUNDS):
        relaxed = solve(coarse(problem, classes), 0.5 * (until - time.perf_counter()))
        if relaxed.choice is None or relaxed.lower_bound is None:
            if relaxed.status == "infeasible":
                return relaxed
            break
        bound = max(bound, relaxed.lower_bound)
        chosen = zip(classes, relaxed.choice, strict=True)
        kept = [np.flatnonzero(of == one) for of, one in chosen]
        found = solve(restricted(problem, kept), max(until - time.perf_counter(), LEAST_SECONDS))
        if found.choice is not None and found.objective is not None:
            choice = tuple(int(some[one]) for some, one in zip(kept, found.choice, strict=True))
            if best is None or best.objective is None or found.objective < best.objective:
                best = evolve(found, choice=choice)
            if best.objective is not None and best.objective - bound <= close * abs(bound):
                break
        if all(len(some) == 1 for some in kept) or time.perf_counter() > until:
            break
        classes = [_apart(of, some) for of, some in zip(classes, kept, strict=True)]
    seconds = time.perf_counter() - began
    if best is None or best.objective is None:
        whole = solve(problem, until - time.perf_counter())
        return evolve(whole, seconds=time.perf_counter() - began)
    bound = min(bound, best.objective)
    status = "optimal" if best.objective <= bound else "feasible"
    return evolve(best, lower_bound=float(bound), status=status, seconds=seconds)


def coarse(problem: ShardingProblem, classes: Classes) -> ShardingProblem:
    """Return the problem whose strategies are the classes, each with the least of its costs."""
    orders = [np.argsort(of, kind="stable") for of in classes]
    firsts = [
        np.searchsorted(of[order], np.arange(of.max() + 1))
        for of, order in zip(classes, orders, strict=True)
    ]
    node_cost = [
        np.minimum.reduceat(cost[order], first)
        for cost, order, first in zip(_by_node(problem), orders, firsts, strict=True)
    ]
    edge_cost = []
    for (one, two), table in zip(problem.edges.tolist(), _tables(problem), strict=True):
        rows = np.minimum.reduceat(table[orders[one]], firsts[one], axis=0)
        edge_cost.append(np.minimum.reduceat(rows[:, orders[two]], firsts[two], axis=1).ravel())
    return _with(problem, node_cost, edge_cost)


def restricted(problem: ShardingProblem, kept: Sequence[Ints]) -> ShardingProblem:
    """Return the problem with the `kept` strategies of each node only."""
    node_cost = [cost[some] for cost, some in zip(_by_node(problem), kept, strict=True)]
    edge_cost = [
        table[np.ix_(kept[one], kept[two])].ravel()
        for (one, two), table in zip(problem.edges.tolist(), _tables(problem), strict=True)
    ]
    return _with(problem, node_cost, edge_cost)


def _by_node(problem: ShardingProblem) -> list[Floats]:
    return np.split(problem.node_cost, np.cumsum(problem.num_strategies)[:-1])


def _tables(problem: ShardingProblem) -> list[Floats]:
    counts = problem.num_strategies
    edges = problem.edges.reshape(-1, 2)
    sizes = counts[edges[:, 0]] * counts[edges[:, 1]]
    parts = np.split(problem.edge_cost, np.cumsum(sizes)[:-1])
    return [
        part.reshape(counts[one], counts[two])
        for (one, two), part in zip(edges.tolist(), parts, strict=False)
    ]


def _with(
    problem: ShardingProblem, node_cost: list[Floats], edge_cost: list[Floats]
) -> ShardingProblem:
    counts = np.array([len(cost) for cost in node_cost], dtype=np.int64)
    return evolve(
        problem,
        num_strategies=counts,
        node_cost=np.concatenate(node_cost),
        node_memory=np.zeros(int(counts.sum())),
        edge_cost=np.concatenate(edge_cost) if edge_cost else np.zeros(0),
        axis_bits=None,
        memory_limit=None,
        node_names=(),
        strategy_names=(),
    )


def _apart(classes: Ints, members: Ints) -> Ints:
    """Return classes in which each of `members`, a class so far, is a class of its own."""
    apart = classes.copy()
    apart[members[1:]] = classes.max() + 1 + np.arange(len(members) - 1)
    return apart
