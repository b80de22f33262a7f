"""The compiled parts of the search against brute force, on one set of small graphs."""

import itertools

import numpy as np
import pytest
from attrs import evolve

from ilp_sharding import SolveOptions
from ilp_sharding.bound.dominance import simplified, without_dominated
from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.bound.messages import choice_cost
from ilp_sharding.branching.memory_nodes import Branching
from ilp_sharding.choice.ball_minimisation import local_cost, minimise_ball, seed_random
from ilp_sharding.choice.construction import PrimalSearch
from ilp_sharding.choice.forest_moves import forest_move
from ilp_sharding.exact.integer_program import IntegerProgram
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.flat_graph import table_graph
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network


def _graphs(random_problem, count, first=0):
    """Yield (seed, base graph, {choice: cost} of the choices that fit)."""
    for seed in range(first, first + count):
        problem = random_problem(seed, nodes=6)
        instance = Instance.of(problem, SolveOptions())
        if not np.isfinite(instance.limit):
            instance = evolve(instance, limit=20.0)
        network = Network(instance)
        try:
            network.reduce()
        except NoAssignment:
            continue
        memory = MemoryProfile(instance, network)
        graph = table_graph(network, memory)
        if graph.num_nodes:
            yield seed, graph, _fitting(graph)


def _fitting(graph):
    tables = graph.tables
    costs = {}
    primal = PrimalSearch(graph, 0)
    for choice in itertools.product(*map(range, np.diff(tables.offset))):
        x = np.array(choice)
        cost = choice_cost(tables, tables.cost, x) + graph.constant
        if cost < np.inf and primal.left(x).min(initial=0.0) >= 0:
            costs[choice] = cost
    return costs


def test_bounds_never_exceed_the_optimum(random_problem):
    for seed, graph, costs in _graphs(random_problem, 150):
        best = min(costs.values(), default=np.inf)
        dual = DualAscent(graph)
        for _ in range(40):
            dual.step(best)
        assert dual.best <= best + 1e-9 * abs(best), seed
        for bound, reduced in dual.reduced(2):
            for choice, cost in costs.items():
                used = reduced[graph.tables.offset[:-1] + np.array(choice)]
                assert bound + used.max() <= cost + 1e-9 * max(abs(cost), abs(bound)), seed


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("first", range(0, 300, 25))
def test_simplified_graphs_keep_an_optimum(random_problem, first):
    for seed, graph, costs in _graphs(random_problem, 25, first):
        smaller = without_dominated(simplified(graph))
        if not costs:
            assert smaller is None or not _fitting(smaller), seed
            continue
        assert smaller is not None, seed
        if smaller.num_nodes:
            kept = _fitting(smaller)
            lifted = {tuple(smaller.lift(np.array(x)).tolist()): c for x, c in kept.items()}
        else:
            lifted = {tuple(smaller.lift(np.zeros(0, int)).tolist()): smaller.constant}
        assert min(lifted.values()) == pytest.approx(min(costs.values()), rel=1e-12), seed
        for choice, cost in lifted.items():
            assert costs[choice] == pytest.approx(cost, rel=1e-12, abs=1e-15), seed


def test_lifting_and_lowering_undo_each_other(random_problem):
    for seed, graph, costs in _graphs(random_problem, 60):
        smaller = simplified(graph)
        if smaller is None or not smaller.num_nodes:
            continue
        for choice in costs:
            lowered = smaller.lower(np.array(choice))
            assert lowered is not None, seed
            assert tuple(smaller.lift(lowered).tolist()) == choice, seed


def test_moves_never_raise_the_cost_they_minimise(random_problem):
    rng = np.random.default_rng(0)
    seed_random(0)
    for seed, graph, costs in _graphs(random_problem, 100):
        tables = graph.tables
        for choice in list(costs)[:3]:
            x = np.array(choice)
            before = choice_cost(tables, tables.cost, x)
            y = x.copy()
            forest_move(tables, tables.cost, rng.permutation(graph.num_nodes), y)
            after = choice_cost(tables, tables.cost, y)
            assert after <= before + 1e-9 * abs(before), seed
            assert local_cost(tables, x, y) == pytest.approx(
                after - before, abs=1e-9 * abs(before) + 1e-15
            )
            y = x.copy()
            minimise_ball(tables, tables.cost, 0, 100, 1e4, 0.0, y)
            assert choice_cost(tables, tables.cost, y) <= before + 1e-9 * abs(before), seed


def test_a_ball_over_everything_is_an_exact_minimum(random_problem):
    seed_random(0)
    for seed, graph, _ in _graphs(random_problem, 100):
        free = evolve(graph, rows=graph.rows._replace(slack=graph.rows.slack + 1e9))
        best = min(_fitting(free).values())
        network_parts = set(range(graph.num_nodes))
        x = np.zeros(graph.num_nodes, dtype=np.int64)
        for centre in network_parts:  # one ball per connected component at least
            minimise_ball(graph.tables, graph.tables.cost, centre, 100, 1e6, 0.0, x)
        got = choice_cost(graph.tables, graph.tables.cost, x) + graph.constant
        if got < np.inf:
            assert got == pytest.approx(best, rel=1e-9, abs=1e-12), seed


def test_constructed_choices_fit(random_problem):
    for seed, graph, costs in _graphs(random_problem, 100):
        dual = DualAscent(graph)
        for _ in range(10):
            dual.step(np.inf)
        primal = PrimalSearch(graph, seed)
        cost = primal.construct(dual.decoded(), dual.price)
        if cost < np.inf:
            assert primal.x is not None, seed
            assert costs[tuple(primal.x.tolist())] == pytest.approx(cost), seed


def test_branching_ends_with_a_proof(random_problem):
    for seed, graph, costs in _graphs(random_problem, 60):
        best = min(costs.values(), default=np.inf)
        if best == np.inf:
            continue
        dual = DualAscent(graph)
        for _ in range(10):
            dual.step(best)
        tree = Branching(dual, steps_per_node=5)
        cutoff = best - 1e-6 * max(abs(best), 1e-6)
        for _ in range(400):
            assert tree.step(cutoff) > -np.inf
            assert tree.done or tree.bound <= best + 1e-9 * abs(best), seed
            if tree.done:
                break


def test_branching_claims_no_proof_by_leaves_below_the_cutoff(random_problem):
    leaves = 0
    for seed, graph, costs in _graphs(random_problem, 150):
        best = min(costs.values(), default=np.inf)
        dual = DualAscent(graph)
        dual.step(np.inf)
        tree = Branching(dual, steps_per_node=1)  # too few for leaves beyond the limit to show it
        cutoff = best + 10.0 if costs else 1e9
        while not tree.done:
            tree.step(cutoff)
            assert tree.bound <= best, seed
        leaves += tree.bound < best
    assert leaves > 10


def test_the_integer_program_finds_the_optimum(random_problem):
    for seed, graph, costs in _graphs(random_problem, 150):
        program = IntegerProgram.of_graph(graph, cutoff=np.inf, seed=0)
        outcome = program.solve(np.inf)
        assert outcome.finished, seed
        if costs:
            assert outcome.chosen is not None, seed
            assert costs[tuple(outcome.chosen.tolist())] == pytest.approx(
                min(costs.values()), rel=1e-7, abs=1e-12
            ), seed
            assert outcome.lower_bound <= min(costs.values()) + 1e-12, seed
        else:
            assert outcome.chosen is None, seed
