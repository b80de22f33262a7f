"""Classes of alike strategies: bounds and choices against the whole problem."""

import math
import time

import numpy as np
import pytest

import ilp_sharding
from alpa_interchange import LogicalMesh, MeshAxis, ShardingProblem, ShardingSpec
from alpa_meta.intra_op.coarse_solution import (
    classes_of,
    coarse,
    equal_axes,
    restricted,
    solve_coarsely,
)
from ilp_sharding.strategies import sharding_specs

NODES, SIZE = 7, 6


def mesh(*bandwidths):
    names = "xyzw"
    return LogicalMesh(
        axes=tuple(
            MeshAxis(name=name, size=2, bandwidth=bandwidth, latency=1e-6)
            for name, bandwidth in zip(names, bandwidths, strict=False)
        )
    )


def random_problem(seed):
    random = np.random.default_rng(seed)
    edges = [(a, b) for a in range(NODES) for b in range(a + 1, NODES) if random.random() < 0.4]
    tables = random.uniform(0, 3, (len(edges), SIZE, SIZE))
    tables[random.random(tables.shape) < 0.1] = math.inf
    tables[:, 0, 0] = 3.0  # so that there is a choice
    problem = ShardingProblem(
        num_strategies=[SIZE] * NODES,
        node_cost=random.uniform(0, 2, NODES * SIZE),
        node_memory=np.zeros(NODES * SIZE),
        live=[[0, 1]] * NODES,
        edges=np.reshape(edges, (-1, 2)),
        edge_cost=tables.ravel(),
    )
    classes = [np.sort(random.integers(0, 3, SIZE)) for _ in range(NODES)]
    classes = [np.unique(of, return_inverse=True)[1][random.permutation(SIZE)] for of in classes]
    return problem, classes


def solve(problem, seconds):
    return ilp_sharding.solve(problem)


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_below_and_the_choice_above_the_optimum(seed):
    problem, classes = random_problem(seed)
    optimum = ilp_sharding.solve(problem).objective
    found = solve_coarsely(problem, classes, solve, time.perf_counter() + 60)
    assert optimum is not None and found.choice is not None
    assert found.lower_bound is not None and found.objective is not None
    assert found.lower_bound <= optimum * (1 + 1e-9)
    assert found.objective >= optimum * (1 - 1e-9)
    assert ilp_sharding.check(problem, found.choice).cost == pytest.approx(found.objective)
    if found.status == "optimal":
        assert found.objective == pytest.approx(optimum)


def test_there_is_a_choice_when_no_time_is_left():
    problem, classes = random_problem(0)
    found = solve_coarsely(problem, classes, solve, time.perf_counter() - 1)
    assert found.choice is not None
    assert ilp_sharding.check(problem, found.choice).cost == pytest.approx(found.objective)


@pytest.mark.parametrize("seed", range(4))
def test_classes_of_one_change_nothing(seed):
    problem, _ = random_problem(seed)
    single = [np.arange(SIZE)] * NODES
    same = coarse(problem, single)
    assert (same.node_cost == problem.node_cost).all()
    assert (same.edge_cost == problem.edge_cost).all()
    found = solve_coarsely(problem, single, solve, time.perf_counter() + 60)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(ilp_sharding.solve(problem).objective)


def test_a_class_costs_the_least_of_its_members_and_restriction_keeps_the_rest():
    problem = ShardingProblem(
        num_strategies=[3, 2],
        node_cost=[5.0, 1.0, 2.0, 4.0, 3.0],
        node_memory=np.zeros(5),
        live=[[0, 1]] * 2,
        edges=[[0, 1]],
        edge_cost=[9.0, 8.0, 7.0, 6.0, 5.0, 4.0],
    )
    less = coarse(problem, [np.array([0, 1, 0]), np.array([0, 0])])
    assert less.node_cost.tolist() == [2.0, 1.0, 3.0]
    assert less.edge_cost.tolist() == [4.0, 6.0]
    part = restricted(problem, [np.array([0, 2]), np.array([1])])
    assert part.node_cost.tolist() == [5.0, 2.0, 3.0]
    assert part.edge_cost.tolist() == [8.0, 4.0]


def test_an_impossible_coarse_problem_proves_the_whole_one_impossible():
    problem = ShardingProblem(
        num_strategies=[2, 2],
        node_cost=np.zeros(4),
        node_memory=np.zeros(4),
        live=[[0, 1]] * 2,
        edges=[[0, 1]],
        edge_cost=[math.inf] * 4,
    )
    found = solve_coarsely(problem, [np.zeros(2, int)] * 2, solve, time.perf_counter() + 60)
    assert found.status == "infeasible"


def test_specs_are_alike_if_only_equal_axes_are_exchanged():
    axes = equal_axes(mesh(1e9, 2e9, 2e9))
    assert axes is not None
    assert axes["y"] == axes["z"] != axes["x"]
    specs = [
        ShardingSpec((("y",), ())),
        ShardingSpec((("z",), ())),
        ShardingSpec((("x",), ())),
        ShardingSpec(((), ("z",))),
        ShardingSpec((("y",), ("z",))),
        ShardingSpec((("z",), ("y",))),
    ]
    assert classes_of(specs, axes).tolist() == [0, 0, 1, 2, 3, 3]
    assert equal_axes(mesh(1e9, 2e9)) is None


def test_equal_axes_leave_few_classes():
    four = mesh(1e9, 1e9, 1e9, 1e9)
    specs = sharding_specs((16, 16, 16, 16), four)
    axes = equal_axes(four)
    assert len(specs) == 625 and axes is not None
    assert classes_of(specs, axes).max() + 1 == 70  # multisets of 4 out of 5
