import math

import numpy as np
import pytest
from attrs import evolve

from alpa_interchange import ShardingProblem
from ilp_sharding import SolveOptions, solve
from ilp_sharding.bound import pruned_sweeps as sweeps
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.methods import pruned
from ilp_sharding.problem.flat_graph import instance_graph
from ilp_sharding.problem.instance import Instance
from ilp_sharding.search import Search

ROUNDS = pruned._ROUNDS


def _solved(problem, known=math.inf, choice=None, tolerance=0.0):
    """Return (search, what is left) of a problem without a memory limit."""
    instance = Instance.of(problem, SolveOptions())
    search = Search(
        instance=instance,
        until=math.inf,
        objective=known,
        choice=choice,
        gap_tolerance=tolerance,
    )
    return search, pruned.solve_pruned(instance_graph(instance), lambda labels: labels, search)


@pytest.mark.parametrize("rounds", [ROUNDS, ROUNDS[:1], ()], ids=["all", "one", "none"])
def test_pruned_sweeps_find_the_optimum_or_that_there_is_none(
    random_problem, brute_force, monkeypatch, rounds
):
    monkeypatch.setattr(pruned, "_ROUNDS", rounds)
    for seed in range(300):
        problem = evolve(random_problem(seed), memory_limit=None)
        best, _ = brute_force(problem)
        if best is not None and best >= 1e17:
            continue  # only a choice with forbidden pairs
        try:
            search, left = _solved(problem)
        except NoAssignment:
            assert best is None, seed
            continue
        assert left is None, seed
        assert search.objective == pytest.approx(best, rel=1e-12, abs=1e-15), seed
        assert search.lower_bound == search.objective, seed


@pytest.mark.parametrize("rounds", [ROUNDS, ROUNDS[:1], ()], ids=["all", "one", "none"])
def test_a_gap_of_messages_is_closed(grid_problem, eliminated, monkeypatch, rounds):
    monkeypatch.setattr(pruned, "_ROUNDS", rounds)
    monkeypatch.setattr(pruned, "_BRANCH_WORK", 100.0)  # so that there are many parts
    for seed in range(8):
        problem = grid_problem(seed, columns=10, size=6)
        best = eliminated(problem)
        search, left = _solved(problem)
        assert left is None, seed
        assert search.objective == pytest.approx(best, rel=1e-12), seed


def test_a_bound_is_found_without_looking_for_choices(grid_problem, eliminated, monkeypatch):
    monkeypatch.setattr(pruned, "_BRANCHED", 1.0)  # so that gaps stay
    monkeypatch.setattr(pruned, "_look_around", None)
    for seed in range(4):
        problem = grid_problem(seed, columns=10, size=6)
        best = eliminated(problem)
        found = solve(problem, SolveOptions(rounds=3, gap_tolerance=1e-3, bound_only=True))
        assert found.objective is not None and found.lower_bound is not None
        assert 0.9 * best < found.lower_bound <= best * (1 + 1e-12) <= found.objective + 1e-9, seed


def test_what_is_left_when_branching_ends_early_has_a_bound(grid_problem, eliminated, monkeypatch):
    monkeypatch.setattr(pruned, "_ROUNDS", ())
    monkeypatch.setattr(pruned, "_BRANCHED", 1.0)
    monkeypatch.setattr(pruned, "_BRANCH_WORK", 100.0)
    unsolved = 0
    for seed in range(8):
        problem = grid_problem(seed, columns=10, size=6)
        best = eliminated(problem)
        search, left = _solved(problem)
        assert search.lower_bound <= best * (1 + 1e-12) <= search.objective * (1 + 2e-12), seed
        unsolved += left is not None
    assert unsolved


def test_a_gap_within_the_tolerance_is_left(grid_problem, eliminated, monkeypatch):
    monkeypatch.setattr(pruned, "_ROUNDS", tuple(evolve(one, work=100.0) for one in ROUNDS))
    monkeypatch.setattr(pruned, "_EASY", 1)
    open_gaps = 0
    for seed in range(8):
        problem = grid_problem(seed, columns=10, size=6)
        best = eliminated(problem)
        search, left = _solved(problem, tolerance=0.5)
        assert left is None, seed
        assert search.lower_bound <= best * (1 + 1e-12) <= search.objective * (1 + 2e-12), seed
        assert search.objective <= search.lower_bound * 1.5, seed
        open_gaps += search.lower_bound < best * (1 - 1e-6)
    assert open_gaps


def test_a_cost_known_before_is_not_to_be_found_again(random_problem, brute_force):
    for seed in range(100):
        problem = evolve(random_problem(seed, nodes=6), memory_limit=None)
        best, _ = brute_force(problem)
        if best is None or best >= 1e17 or best <= 0:
            continue
        other = np.zeros(6, dtype=np.int64)
        search, left = _solved(problem, known=0.5 * best, choice=other)
        assert left is None and search.choice is other, seed
        assert search.lower_bound >= 0.5 * best * (1 - 1e-9), seed


def _frustrated(num_nodes=100, degree=10, kinds=6, seed=0):
    """Return a problem whose best choice uses one axis everywhere, at 1 per node: on both axes a
    node costs less, but much beside one of its kind, of which there are too few."""
    random = np.random.default_rng(seed)
    drawn = random.integers(0, num_nodes, (num_nodes * degree // 2, 2)).tolist()
    edges = sorted({(min(pair), max(pair)) for pair in drawn if pair[0] != pair[1]})
    table = np.zeros((kinds + 1, kinds + 1))
    table[0, 1:] = table[1:, 0] = 1.0
    alike = np.arange(kinds) % 3
    table[1:, 1:] = np.where(alike[:, None] == alike, 1.6, 0.0)
    return ShardingProblem(
        num_strategies=np.full(num_nodes, kinds + 1),
        node_cost=np.tile([1.0, *[0.45] * kinds], num_nodes),
        node_memory=np.zeros(num_nodes * (kinds + 1)),
        live=np.tile([[0, 1]], (num_nodes, 1)),
        edges=np.array(edges),
        edge_cost=np.tile(table.ravel(), len(edges)),
        axis_bits=np.tile([1, *[3] * kinds], num_nodes),
    )


def test_a_choice_on_fewer_axes_is_found_where_messages_use_all():
    problem = _frustrated()
    instance = Instance.of(problem, SolveOptions())
    search = Search(instance=instance, until=math.inf)
    found = []
    for axes in (None, pruned._Axes(instance.offset, problem.axis_bits)):
        rest = sweeps.rest_of(instance_graph(instance))
        pruned._climb(rest, 8, search)
        decoded = float(rest.numbers[sweeps.OBJECTIVE])
        pruned._look_around(rest, search, axes)
        found.append(float(rest.numbers[sweeps.OBJECTIVE]))
        assert instance.objective(rest.choice) == pytest.approx(found[-1])
        assert found[-1] < decoded
    assert found[1] == pytest.approx(problem.num_nodes) and found[0] > found[1]


def test_axes_change_no_optimum(random_problem, brute_force, monkeypatch):
    monkeypatch.setattr(pruned, "_EASY", 0)  # looked for at once
    for seed in range(100):
        problem = evolve(random_problem(seed), memory_limit=None)
        best, _ = brute_force(problem)
        if best is None or best >= 1e17:
            continue
        bits = np.random.default_rng(seed).integers(0, 8, len(problem.node_cost))
        instance = Instance.of(evolve(problem, axis_bits=bits), SolveOptions())
        search = Search(instance=instance, until=math.inf)
        graph = instance_graph(instance)
        assert pruned.solve_pruned(graph, lambda labels: labels, search, bits) is None
        assert search.objective == pytest.approx(best, rel=1e-12, abs=1e-15), seed
        assert search.lower_bound == search.objective, seed
