"""Problems built piece by piece: equal keys fold, costs add up."""

import itertools

import numpy as np
import pytest

from alpa_interchange import ShardingProblem
from ilp_sharding import solve
from ilp_sharding.strategies.problem_builder import ProblemBuilder


def cost_of(problem: ShardingProblem, choice) -> float:
    """Return the objective of a choice, straight from the definition."""
    offsets = np.concatenate([[0], np.cumsum(problem.num_strategies)])
    total = sum(problem.node_cost[offsets[i] + c] for i, c in enumerate(choice))
    start = 0
    for i, j in problem.edges:
        size = problem.num_strategies[i], problem.num_strategies[j]
        table = problem.edge_cost[start : start + size[0] * size[1]].reshape(size)
        total += table[choice[i], choice[j]]
        start += size[0] * size[1]
    return float(total)


def test_nodes_of_one_key_are_one_and_their_costs_add_up():
    builder = ProblemBuilder()
    first = builder.node("layer", "matmul", ("a", "b"))
    builder.add_cost(first, np.array([1.0, 2.0]))
    builder.add_memory(first, np.array([10.0, 5.0]))
    again = builder.node("layer", "matmul", ("a", "b"))
    builder.add_cost(again, np.array([1.0, 2.0]))
    builder.add_memory(again, np.array([10.0, 5.0]))
    problem = builder.build("two layers", 15.0)
    assert first == again == 0
    assert problem.num_nodes == 1
    assert problem.node_cost.tolist() == [2.0, 4.0]
    assert problem.node_memory.tolist() == [20.0, 10.0]
    assert problem.memory_limit == 15.0
    assert solve(problem).choice == (1,)


def test_a_node_of_one_key_keeps_its_strategies():
    builder = ProblemBuilder()
    builder.node("layer", "matmul", ("a", "b"))
    with pytest.raises(ValueError, match="given with 3 strategies, .* has 2"):
        builder.node("layer", "matmul", ("a", "b", "c"))


def test_edges_between_the_same_nodes_add_up_in_either_direction():
    builder = ProblemBuilder()
    a, b = builder.node("a", "a", ("0", "1")), builder.node("b", "b", ("0", "1", "2"))
    table = np.arange(6.0).reshape(2, 3)
    builder.add_edge(a, b, table)
    builder.add_edge(b, a, 10 * table.T)
    problem = builder.build("edges")
    assert problem.edges.tolist() == [[0, 1]]
    assert problem.edge_cost.reshape(2, 3).tolist() == (11 * table).tolist()


def test_an_edge_from_a_node_to_itself_is_a_cost_of_the_node():
    builder = ProblemBuilder()
    a = builder.node("a", "a", ("0", "1"))
    builder.add_edge(a, a, np.array([[1.0, 9.0], [9.0, 2.0]]))
    problem = builder.build("self")
    assert problem.num_edges == 0
    assert problem.node_cost.tolist() == [1.0, 2.0]


def test_an_empty_problem_can_be_built():
    problem = ProblemBuilder().build("empty")
    assert (problem.num_nodes, problem.num_edges) == (0, 0)


def test_a_folded_problem_costs_what_equal_layers_with_equal_choices_cost():
    generator = np.random.default_rng(0)
    folded, plain = ProblemBuilder(), ProblemBuilder()
    node_cost, inner, between = (
        generator.random((2, 3)),
        generator.random((3, 3)),
        generator.random((3, 3)),
    )
    layers = 4
    for builder, key in ((folded, lambda layer: 0), (plain, lambda layer: layer)):
        previous = None
        for layer in range(layers):
            nodes = [builder.node((key(layer), k), f"op{k}", ("0", "1", "2")) for k in range(2)]
            for k, node in enumerate(nodes):
                builder.add_cost(node, node_cost[k])
            builder.add_edge(nodes[0], nodes[1], inner)
            if previous is not None:
                builder.add_edge(previous, nodes[0], between)
            previous = nodes[1]
    small, large = folded.build("folded"), plain.build("plain")
    assert (small.num_nodes, large.num_nodes) == (2, 2 * layers)
    for choice in itertools.product(range(3), repeat=2):
        assert cost_of(small, choice) == pytest.approx(cost_of(large, choice * layers))
    best = min(cost_of(small, choice) for choice in itertools.product(range(3), repeat=2))
    assert solve(small).objective == pytest.approx(best)
