"""A selection problem with more seconds on its nodes and edges."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import evolve

from alpa_interchange import ShardingProblem
from alpa_meta.types import Floats


def with_added(
    problem: ShardingProblem, added: Iterable[tuple[int, int, Floats]]
) -> ShardingProblem:
    """Return `problem` with `added` seconds: (first node, second node, [first, second] or, of one
    node twice, its [strategies] or the matrix of which the diagonal counts)."""
    counts = problem.num_strategies
    starts = np.cumsum(counts) - counts
    places = edge_places(problem)
    node_cost, edge_cost = problem.node_cost.copy(), problem.edge_cost.copy()
    for first, second, more in added:
        if first == second:
            own = np.diagonal(more) if more.ndim > 1 else more
            node_cost[starts[first] : starts[first] + len(own)] += own
            continue
        if first > second:
            first, second, more = second, first, more.T
        start = places[first, second]
        edge_cost[start : start + more.size] += more.ravel()
    return evolve(problem, node_cost=node_cost, edge_cost=edge_cost)


def edge_places(problem: ShardingProblem) -> dict[tuple[int, int], int]:
    """Return {(first, second): where the costs of this edge begin in `edge_cost`}."""
    counts = problem.num_strategies
    edges = problem.edges.reshape(-1, 2)
    starts = np.concatenate([[0], np.cumsum(counts[edges[:, 0]] * counts[edges[:, 1]])])
    return {(int(a), int(b)): int(k) for (a, b), k in zip(edges, starts, strict=False)}
