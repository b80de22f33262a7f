import time

import numpy as np
import pytest
from attrs import evolve

from ilp_sharding import SolveOptions, check, solve
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.methods.rounds import search_rounds
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search


@pytest.mark.sample(limit=1)  # without a limit of memory, too: test_repeatable
@pytest.mark.parametrize("limit", [1500.0, None])
def test_two_searches_of_as_many_rounds_are_alike(wide_problem, limit, monkeypatch):
    monkeypatch.setattr("ilp_sharding.solver.WorkerPool.start", None)
    problem = wide_problem(0, nodes=120, limit=limit)
    first, second = (solve(problem, SolveOptions(rounds=3)) for _ in range(2))
    assert evolve(first, seconds=0.0) == evolve(second, seconds=0.0)
    assert first.choice is not None and check(problem, first.choice).feasible
    longer = solve(problem, SolveOptions(rounds=10))
    assert longer.objective is not None and first.objective is not None
    assert longer.lower_bound is not None and first.lower_bound is not None
    assert longer.objective <= first.objective and longer.lower_bound >= first.lower_bound


def test_rounds_find_the_optimum_of_small_problems(random_problem, brute_force):
    proved = 0
    for seed in range(150):
        problem = random_problem(seed, nodes=6)
        best, _ = brute_force(problem)
        if best is not None and best >= 1e17:
            continue  # only a choice with forbidden pairs
        instance = Instance.of(problem, SolveOptions())
        search = Search(instance=instance, until=time.perf_counter() + 600)
        network = Network(instance)
        try:
            network.reduce()
            if not network.open_nodes():
                continue
            memory = MemoryProfile(instance, network) if instance.limit < np.inf else None
            search_rounds(network, memory, search, 5)
        except NoAssignment:
            if search.choice is None:
                assert best is None, seed
                continue
            search.raise_bound(search.objective, "proof")
        assert search.lower_bound <= best + 1e-9 * abs(best), seed
        if search.closed:
            proved += 1
            assert search.objective == pytest.approx(best, rel=1e-12, abs=1e-15), seed
    assert proved > 50
