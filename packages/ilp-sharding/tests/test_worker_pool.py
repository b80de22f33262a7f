import attrs
import numpy as np
import pytest

from ilp_sharding import SolveOptions, check, solve


@pytest.mark.slow
def test_worker_processes_improve_on_the_start_and_never_overstate_the_bound(wide_problem):
    problem = wide_problem(3, limit=1200.0)
    start = solve(problem, SolveOptions(deadline=0.02))
    found = solve(problem, SolveOptions(deadline=12.0))
    assert found.choice is not None and check(problem, found.choice).feasible
    assert found.seconds < 13.5
    assert found.lower_bound <= found.objective
    if start.objective is not None:
        assert found.objective <= start.objective


@pytest.mark.slow
def test_worker_processes_agree_with_a_planted_optimum(wide_problem):
    problem = wide_problem(4, nodes=60, size=12)
    rng = np.random.default_rng(0)
    planted = rng.integers(0, 12, problem.num_nodes)
    cost = problem.node_cost + 1
    cost[np.arange(problem.num_nodes) * 12 + planted] = 0
    tables = problem.edge_cost.reshape(-1, 12, 12) + 1
    pairs = problem.edges
    tables[np.arange(len(pairs)), planted[pairs[:, 0]], planted[pairs[:, 1]]] = 0
    easy = attrs.evolve(problem, node_cost=cost, edge_cost=tables.ravel())
    solution = solve(easy, SolveOptions(deadline=60.0))
    assert solution.status == "optimal" and solution.objective == 0.0
    assert solution.choice == tuple(planted.tolist())
