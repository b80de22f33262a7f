"""Prices on memory, against all choices of small problems."""

import itertools
import math
import time

import numpy as np
import pytest
from attrs import evolve

import ilp_sharding
from alpa_interchange import LogicalMesh, MeshAxis, ShardingProblem, ShardingSpec
from alpa_meta.intra_op.added_costs import edge_places
from alpa_meta.intra_op.liveness import Span
from alpa_meta.intra_op.memory_profile import Copy, MemoryProfile
from alpa_meta.intra_op.priced_memory import PricedMemory, problem_cost
from alpa_meta.intra_op.stage_problem import Source

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e9, latency=1e-6),))
SPECS = (ShardingSpec(((),)), ShardingSpec((("x",),)))
NODES, TIMES = 6, 8
CHOICES = list(itertools.product(range(2), repeat=NODES))


def random_problem(seed):
    """Whole is cheap and large, parts are dear and small; one pair of neighbours is forbidden."""
    random = np.random.default_rng(seed)
    cost = np.array([[random.uniform(0, 1), random.uniform(1, 5)] for _ in range(NODES)])
    edges = [(node, node + 1) for node in range(NODES - 1)]
    tables = random.uniform(0, 3, (len(edges), 2, 2))
    tables[int(random.integers(len(edges))), 0, 1] = math.inf
    problem = ShardingProblem(
        num_strategies=[2] * NODES,
        node_cost=cost.ravel(),
        node_memory=np.zeros(2 * NODES),
        live=[[0, 1]] * NODES,
        edges=edges,
        edge_cost=tables.ravel(),
    )
    spans = []
    for _ in range(14):
        start, stop = sorted(random.choice(TIMES + 1, 2, replace=False))
        source = Source(int(random.integers(NODES)), SPECS, (8,), float(random.integers(20, 99)))
        spans.append(Span(source, int(start), int(stop), 3))
    copies = [
        Copy(2, 4, 0, 1, np.array([[0.0, 25.0], [0.0, 0.0]])),
        Copy(1, 5, 3, 2, np.array([[0.0, 0.0], [40.0, 0.0]])),
    ]
    return problem, MemoryProfile(spans, copies, MESH, [2] * NODES, TIMES)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3, 0.15])
@pytest.mark.parametrize("seed", range(8))
def test_choices_fit_and_bounds_hold_for_all_choices(seed, share):
    problem, profile = random_problem(seed)
    peaks = {choice: profile.peak(choice).total for choice in CHOICES}
    costs = {choice: ilp_sharding.check(problem, choice).cost for choice in CHOICES}
    possible = [choice for choice in CHOICES if math.isfinite(costs[choice])]
    free = ilp_sharding.solve(problem)
    assert free.choice is not None
    limit = share * peaks[free.choice]
    priced = PricedMemory(problem, profile, limit, ilp_sharding.solve)
    priced.search(free, time.perf_counter() + 60)
    fitting = [costs[choice] for choice in possible if peaks[choice] <= limit]
    assert priced.least_peak <= min(peaks[choice] for choice in possible) * (1 + 1e-9)
    assert priced.lower_bound <= min(fitting, default=math.inf) * (1 + 1e-9)
    if priced.choice is not None:
        assert peaks[priced.choice] <= limit
        assert priced.objective == pytest.approx(costs[priced.choice])
    if priced.least_peak > limit:
        assert not fitting


@pytest.mark.parametrize("seed", range(8))
def test_a_limit_below_the_least_peak_of_one_time_is_proved_too_small(seed):
    problem, profile = random_problem(seed)
    limit = 0.9 * max(profile.usage((1,) * NODES).sum(axis=0))
    priced = PricedMemory(problem, profile, limit, ilp_sharding.solve)
    priced.search(ilp_sharding.solve(problem), time.perf_counter() + 60)
    assert priced.choice is None
    assert priced.least_peak > limit


def test_the_cost_of_a_choice_is_that_of_its_nodes_and_edges():
    problem, _ = random_problem(0)
    for choice in CHOICES:
        expected = ilp_sharding.check(problem, choice).cost
        assert problem_cost(problem, choice) == pytest.approx(expected)
    assert edge_places(problem) == {(node, node + 1): 4 * node for node in range(NODES - 1)}


def test_choices_with_a_gap_do_not_keep_the_prices_where_they_are():
    problem, profile = random_problem(0)
    free = ilp_sharding.solve(problem)
    solved = []

    def roughly(priced):
        """Return the choices of a solver that proves little."""
        found = ilp_sharding.solve(priced)
        solved.append(found.choice)
        assert found.objective is not None
        return evolve(found, lower_bound=found.objective - 0.05 * abs(found.objective))

    limit = 0.5 * profile.peak(free.choice).total
    PricedMemory(problem, profile, limit, roughly).search(free, time.perf_counter() + 60)
    assert len(solved) < 20  # of 60 steps
