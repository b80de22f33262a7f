from importlib.util import find_spec

import pytest

from ilp_sharding import check, solve

pytestmark = pytest.mark.skipif(find_spec("cvxpy") is None, reason="cvxpy is not installed")


@pytest.mark.filterwarnings("ignore")
def test_cvxpy_agrees_with_the_native_path(random_problem):
    from ilp_sharding.cvxpy_model import solve_with_cvxpy

    for seed in range(40):
        problem = random_problem(seed)
        if problem.node_cost.dtype.kind == "i" and (problem.edge_cost >= 10**18).any():
            continue  # 10^18 is beyond the tolerances of a model without reductions
        if (problem.node_cost >= 10**18).any():
            continue
        native, modelled = solve(problem), solve_with_cvxpy(problem)
        assert native.status == modelled.status, seed
        if native.choice is not None:
            assert modelled.objective == pytest.approx(native.objective, rel=1e-6, abs=1e-9), seed
            assert modelled.choice is not None, seed
            assert check(problem, modelled.choice).feasible, seed
