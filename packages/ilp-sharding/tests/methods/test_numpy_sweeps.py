import math
import time

import numpy as np
import pytest

from ilp_sharding import SolveOptions, check
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.methods.numpy_sweeps import Sweeps, swept_start
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search


def _reduced(problem):
    instance = Instance.of(problem, SolveOptions())
    network = Network(instance)
    network.reduce()
    memory = MemoryProfile(instance, network) if np.isfinite(instance.limit) else None
    return instance, network, memory


def test_sweeps_never_overstate_the_bound_and_choices_fit(random_problem, brute_force):
    chosen = 0
    for seed in range(300):
        problem = random_problem(seed, nodes=6)
        best, _ = brute_force(problem)
        try:
            instance, network, memory = _reduced(problem)
        except NoAssignment:
            continue
        search = Search(instance=instance, until=math.inf)
        swept_start(network, search, memory, math.inf)
        if best is not None:
            assert search.lower_bound <= best + 1e-12 * abs(best), seed
        if search.choice is not None:
            chosen += 1
            assert best is not None and check(problem, search.choice.tolist()).feasible, seed
    assert chosen > 100


def test_sweeps_are_exact_on_a_chain(random_problem):
    # two nodes: one sweep is dynamic programming
    found = 0
    for seed in range(60):
        problem = random_problem(seed, nodes=2, limit=False)
        try:
            _, network, _ = _reduced(problem)
        except NoAssignment:
            continue
        nodes = network.open_nodes()
        if len(nodes) != 2 or nodes[1] not in network.tables[nodes[0]]:
            continue
        a, b = nodes
        table = network.tables[a][b] + network.cost[a][:, None] + network.cost[b]
        sweeps = Sweeps(network)
        sweeps.sweep(forward=True, until=math.inf)
        bound = sweeps.sweep(forward=False, until=math.inf)
        assert bound == pytest.approx(table.min() + network.constant(), rel=1e-9), seed
        found += 1
    assert found > 5


def test_a_sweep_that_is_too_late_says_nothing(wide_problem):
    _, network, _ = _reduced(wide_problem(0))
    assert Sweeps(network).sweep(forward=True, until=time.perf_counter()) == -math.inf
