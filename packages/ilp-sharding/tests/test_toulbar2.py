"""pytoulbar2, a cost function network solver, as oracle where brute force ends."""

import numpy as np
import pytest

from alpa_interchange import ShardingProblem
from ilp_sharding import SolveOptions, solve

pytoulbar2 = pytest.importorskip("pytoulbar2", reason="pytoulbar2 is not installed")


def _grid(seed, side=5, size=5):
    """Return a grid of nodes with integer costs and some forbidden pairs."""
    rng = np.random.default_rng(seed)
    nodes = np.arange(side * side).reshape(side, side)
    edges = [*zip(nodes[:, :-1].ravel(), nodes[:, 1:].ravel(), strict=True)]
    edges += [*zip(nodes[:-1].ravel(), nodes[1:].ravel(), strict=True)]
    table = rng.integers(0, 100, len(edges) * size * size).astype(float)
    table[rng.random(len(table)) < 0.15] = np.inf
    return ShardingProblem(
        num_strategies=np.full(nodes.size, size),
        node_cost=rng.integers(0, 100, nodes.size * size).astype(float),
        node_memory=np.zeros(nodes.size * size),
        live=np.tile([0, 1], (nodes.size, 1)),
        edges=np.array(edges),
        edge_cost=table,
        memory_limit=None,
    )


def _optimum(problem):
    size, top = int(problem.num_strategies[0]), 1e6
    network = pytoulbar2.CFN(top)
    for i in range(problem.num_nodes):
        network.AddVariable(f"x{i}", range(size))
        network.AddFunction([f"x{i}"], problem.node_cost[i * size : (i + 1) * size].tolist())
    for e, (a, b) in enumerate(problem.edges.tolist()):
        costs = np.minimum(problem.edge_cost[e * size * size : (e + 1) * size * size], top)
        network.AddFunction([f"x{a}", f"x{b}"], costs.tolist())
    found = network.Solve()
    return None if found is None else found[1]


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_is_that_of_toulbar2(seed):
    problem = _grid(seed)
    solution = solve(problem, SolveOptions(rounds=20))
    assert solution.status in ("optimal", "infeasible")
    assert solution.objective == _optimum(problem)
