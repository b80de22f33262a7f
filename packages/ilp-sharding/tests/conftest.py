"""Random small problems and their brute-force answers, shared by the tests of this package."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from alpa_interchange.selection import ShardingProblem
from ilp_sharding import SolveOptions
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.reduction import Network

Maker = Callable[..., ShardingProblem]
Oracle = Callable[[ShardingProblem], tuple[float | None, float | None]]


def _random_problem(seed: int, nodes: int | None = None, limit: bool = True) -> ShardingProblem:
    rng = np.random.default_rng(seed)
    n = nodes or int(rng.integers(1, 7))
    count = rng.integers(1, 5, n)
    num_edges = int(rng.integers(0, 2 * n + 1))
    edges = rng.integers(0, n, (num_edges, 2))  # parallel edges and self-edges happen
    entries = int((count[edges[:, 0]] * count[edges[:, 1]]).sum())
    total = int(count.sum())
    kind = int(rng.integers(0, 4))
    cost: np.ndarray
    table: np.ndarray
    if kind == 0:  # many ties
        cost, table = rng.integers(0, 3, total), rng.integers(0, 3, entries)
    elif kind == 1:
        cost, table = rng.integers(-10, 100, total), rng.integers(-10, 100, entries)
    elif kind == 2:
        cost, table = rng.random(total) * 1e-3, rng.random(entries) * 1e-3
    else:
        cost, table = rng.integers(0, 10**9, total), rng.integers(0, 10**9, entries)
    forbidden = np.inf if kind == 2 else 10**18
    table = np.where(rng.random(entries) < rng.choice([0, 0.2, 0.5, 0.8]), forbidden, table)
    cost = np.where(rng.random(total) < 0.05, forbidden, cost)
    memory = rng.integers(0, 10, total) if rng.random() < 0.7 else rng.random(total) * 5
    return ShardingProblem(
        num_strategies=count,
        node_cost=cost,
        node_memory=memory,
        live=np.sort(rng.integers(0, 6, (n, 2)), axis=1),  # empty intervals happen
        edges=edges,
        edge_cost=table,
        memory_limit=float(rng.integers(0, 25)) if limit and rng.random() < 0.7 else None,
    )


def _brute_force(problem: ShardingProblem) -> tuple[float | None, float | None]:
    """Return (least cost within the limit, least peak memory), over choices of finite cost.

    Written without the package: loops over all choices and all times.
    """
    count = problem.num_strategies.tolist()
    start = np.concatenate([[0], np.cumsum(count)]).tolist()
    edges = problem.edges.reshape(-1, 2).tolist()
    live = problem.live.reshape(-1, 2).tolist()
    best: float | None = None
    least: float | None = None
    for choice in itertools.product(*map(range, count)):
        cost = 0
        for i, s in enumerate(choice):
            cost += problem.node_cost[start[i] + s].item()
        entry = 0
        for a, b in edges:
            cost += problem.edge_cost[entry + choice[a] * count[b] + choice[b]].item()
            entry += count[a] * count[b]
        if cost == np.inf:
            continue
        peak = max(
            (
                sum(
                    problem.node_memory[start[i] + choice[i]].item()
                    for i, (a, b) in enumerate(live)
                    if a <= t < b
                )
                for t in range(6)
            ),
            default=0,
        )
        least = peak if least is None else min(least, peak)
        fits = problem.memory_limit is None or peak <= problem.memory_limit * (1 + 1e-9)
        if fits and (best is None or cost < best):
            best = cost
    return best, least


@pytest.fixture(scope="session")
def random_problem() -> Maker:
    return _random_problem


@pytest.fixture(scope="session")
def brute_force() -> Oracle:
    return _brute_force


@pytest.fixture(scope="session")
def wide_problem() -> Maker:
    """A random graph too wide for elimination, so that worker processes search it."""

    def make(seed: int, nodes: int = 60, size: int = 12, limit: float | None = None):
        rng = np.random.default_rng(seed)
        pairs = [(i, j) for i in range(nodes) for j in range(i + 1, nodes) if rng.random() < 0.15]
        return ShardingProblem(
            num_strategies=np.full(nodes, size),
            node_cost=rng.integers(0, 1000, nodes * size),
            node_memory=rng.integers(1, 100, nodes * size),
            live=np.tile([0, 10], (nodes, 1)),
            edges=np.array(pairs),
            edge_cost=rng.integers(0, 1000, len(pairs) * size * size),
            memory_limit=limit,
        )

    return make


@pytest.fixture(scope="session")
def grid_problem() -> Maker:
    """Neighbours in a grid share a random table: messages leave a gap, elimination is exact."""

    def make(seed: int, rows: int = 4, columns: int = 12, size: int = 8) -> ShardingProblem:
        rng = np.random.default_rng(seed)
        node = np.arange(rows * columns).reshape(rows, columns)
        pairs = [
            *zip(node[:-1].ravel(), node[1:].ravel(), strict=True),
            *zip(node[:, :-1].ravel(), node[:, 1:].ravel(), strict=True),
        ]
        return ShardingProblem(
            num_strategies=np.full(node.size, size),
            node_cost=rng.random(node.size * size),
            node_memory=np.zeros(node.size * size),
            live=np.tile([0, 1], (node.size, 1)),
            edges=np.array(pairs),
            edge_cost=rng.random(len(pairs) * size * size),
        )

    return make


@pytest.fixture(scope="session")
def eliminated() -> Callable[[ShardingProblem], float]:
    """Return the least cost of a problem without a memory limit, by elimination alone."""

    def least(problem: ShardingProblem) -> float:
        network = Network(Instance.of(problem, SolveOptions()))
        nodes = range(problem.num_nodes)
        sizes = {node: len(network.cost[node]) for node in nodes}
        elimination = Elimination(nodes, sizes, network.tables)
        return float(elimination.solve(dict(enumerate(network.cost)))[0])

    return least
