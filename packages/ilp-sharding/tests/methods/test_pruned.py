import math

import numpy as np
import pytest
from attrs import evolve

from ilp_sharding import SolveOptions
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.methods import pruned
from ilp_sharding.problem.flat_graph import instance_graph
from ilp_sharding.problem.instance import Instance
from ilp_sharding.search import Search

ROUNDS = pruned._ROUNDS


def _solved(problem, known=math.inf, choice=None):
    """Return (search, what is left) of a problem without a memory limit."""
    instance = Instance.of(problem, SolveOptions())
    search = Search(instance=instance, until=math.inf, objective=known, choice=choice)
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
