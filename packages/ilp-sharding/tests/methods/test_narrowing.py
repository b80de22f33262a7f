import time

import numpy as np
import pytest
from attrs import evolve

from alpa_interchange.selection import ShardingProblem
from ilp_sharding import SolveOptions, check, solve
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.methods.narrowing import narrow
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search


def _narrowed(problem, with_memory, tolerance=0.0):
    """Return (search, whether `narrow` solved it) of the reduced problem."""
    instance = Instance.of(problem, SolveOptions())
    search = Search(instance=instance, until=time.perf_counter() + 60, gap_tolerance=tolerance)
    network = Network(instance)
    network.reduce()
    memory = MemoryProfile(instance, network) if with_memory else None
    return search, bool(network.open_nodes()) and narrow(network, search, memory)


@pytest.mark.parametrize("with_memory", [False, True])
def test_what_messages_leave_holds_the_optimum(random_problem, brute_force, with_memory):
    solved = 0
    for seed in range(300):
        problem = random_problem(seed, nodes=6)
        limit = (problem.memory_limit or 15.0) if with_memory else None
        problem = evolve(problem, memory_limit=limit)
        best, _ = brute_force(problem)
        if best is not None and best >= 1e17:
            continue  # only a choice with forbidden pairs
        try:
            search, done = _narrowed(problem, with_memory)
        except NoAssignment:
            assert best is None, seed
            continue
        if best is not None:
            assert search.lower_bound <= best + 1e-12 * abs(best), seed
        if search.choice is not None:
            assert best is not None and search.objective >= best - 1e-9 * abs(best), seed
            assert check(problem, search.choice.tolist()).feasible, seed
        if search.infeasible:  # no choice keeps the limit
            assert best is None, seed
        elif done:
            assert search.objective == pytest.approx(best, rel=1e-12, abs=1e-15), seed
            solved += 1
    assert solved > 25


def test_a_bound_within_the_tolerance_is_still_a_bound(grid_problem, eliminated):
    for seed in range(20):
        problem = grid_problem(seed)
        best = eliminated(problem)
        search, done = _narrowed(problem, False, tolerance=0.05)
        assert done and search.lower_bound <= best * (1 + 1e-9), seed
        assert best * (1 - 1e-9) <= search.objective <= search.lower_bound * 1.05, seed


def _planner_like(nodes, size, seed):
    """A chain of `nodes` whose every seventh node also reads one far behind, no table separable."""
    rng = np.random.default_rng(seed)
    pairs = [(i - 1, i) for i in range(1, nodes)]
    pairs += [(i - span, i) for i in range(40, nodes, 7) for span in (5, 17, 29, 38)]
    ways = rng.integers(0, 4, (nodes, size))  # a conversion costs by how much it changes
    tables = [np.abs(ways[a][:, None] - ways[b][None]) * rng.random() * 1e-3 for a, b in pairs]
    return ShardingProblem(
        num_strategies=np.full(nodes, size),
        node_cost=rng.random(nodes * size) * 1e-3,
        node_memory=np.zeros(nodes * size),
        live=np.tile([0, 1], (nodes, 1)),
        edges=np.array(pairs),
        edge_cost=np.concatenate([table.ravel() for table in tables]),
    )


def test_wide_planner_problems_are_proved_without_worker_processes(monkeypatch):
    problem = _planner_like(300, 24, 0)
    sizes = dict(enumerate([24] * 300))
    network = Network(Instance.of(problem, SolveOptions()))
    assert Elimination(range(300), sizes, network.tables, 1e8).complete is False
    monkeypatch.setattr("ilp_sharding.solver.WorkerPool.start", None)
    solution = solve(problem, SolveOptions(deadline=60.0))
    assert solution.status == "optimal"
