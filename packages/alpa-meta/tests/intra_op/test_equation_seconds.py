"""Seconds of equations under any choice: those that share conversions are what each would have."""

import numpy as np
import pytest

from alpa_meta.intra_op.equation_seconds import Edge, EquationSeconds, Priced
from ilp_sharding.strategies import ProblemBuilder

COUNT, SIZES, STRATEGIES = 6, 2, (1, 3, 2, 4)
BITS = [np.arange(count) for count in STRATEGIES]  # axes that strategies use


def random_seconds(seed):
    """Return (seconds, other costs) of random equations, some of which are priced alike."""
    random = np.random.default_rng(seed)

    def priced(*shape):
        return Priced(tuple(random.random(shape) for _ in range(SIZES)))

    pairs = [(1, 2), (3, 2), (1, 3), (2, 2)]
    alike = {(a, b): priced(STRATEGIES[a], STRATEGIES[b]) for a, b in pairs}
    edges = []
    for position in range(COUNT):
        for (first, second), seconds in alike.items():
            if random.random() < 0.5:
                seconds = seconds if random.random() < 0.5 else priced(*seconds.at[0].shape)
                home, times = int(random.integers(COUNT)), int(random.integers(1, 4))
                edges.append(Edge(position, home, first, second, times, seconds))
    nodes = [int(random.integers(len(STRATEGIES))) for _ in range(COUNT)]
    costs = [(k, node, priced(STRATEGIES[node])) for k, node in enumerate(nodes)]
    others = [(k, node, priced(STRATEGIES[node])) for k, node in enumerate(nodes)]
    return EquationSeconds(COUNT, SIZES, costs, edges, BITS), others


def assert_equal(found, expected):
    random = np.random.default_rng(0)
    assert len(found.tables) == len(expected.tables) == SIZES
    for size in range(SIZES):
        for _ in range(8):
            choice = [int(random.integers(count)) for count in STRATEGIES]
            assert (found.under(choice, size) == expected.under(choice, size)).all()
        inside = random.random(found.count) < 0.7
        mine, its = (of.problem_of(inside, of.tables[size]) for of in (found, expected))
        assert mine.node_names == its.node_names and (mine.edges == its.edges).all()
        assert (mine.node_cost == its.node_cost).all() and (mine.edge_cost == its.edge_cost).all()
        before = random.random(found.count) < 0.5
        pairs = (of.between(before, ~before, of.tables[size]) for of in (found, expected))
        for (*nodes, matrix), (*its_nodes, its_matrix) in zip(*pairs, strict=True):
            assert nodes == its_nodes and (matrix == its_matrix).all()


@pytest.mark.parametrize("seed", range(6))
def test_seconds_that_share_conversions_are_those_of_their_own(seed):
    seconds, others = random_seconds(seed)
    own = EquationSeconds(COUNT, SIZES, others, seconds.edges, BITS)
    assert_equal(seconds.with_costs(others), own)


@pytest.mark.parametrize("again", [(), (0,), (1, 4, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_conversions_run_once_more_where_their_equation_does(seed, again):
    seconds, others = random_seconds(seed)
    costs = others + [(COUNT + k, node, priced) for k, node, priced in others if k in again]
    more = [
        one._replace(position=COUNT + one.position, home=COUNT + one.position)
        for one in seconds.edges
        if one.position in again
    ]
    own = EquationSeconds(2 * COUNT, SIZES, costs, [*seconds.edges, *more], BITS)
    assert_equal(seconds.with_again(costs, again), own)


@pytest.mark.parametrize("seed", range(6))
def test_a_problem_at_another_size_has_the_seconds_of_that_size(seed):
    seconds, _ = random_seconds(seed)
    random = np.random.default_rng(seed)
    times = random.integers(1, 4, COUNT).tolist()
    for _, _, priced in seconds.costs:  # strategies that cannot be, here or at the other size
        priced.at[0][random.random(len(priced.at[0])) < 0.1] = np.inf
        priced.at[1][random.random(len(priced.at[1])) < 0.1] = np.inf
        priced.at[1][np.isinf(priced.at[0])] = np.inf

    def problem_at(size):
        problem = ProblemBuilder()
        for number, count in enumerate(STRATEGIES):
            problem.node(number, str(number), [""] * count)
        for position, node, priced in seconds.costs:
            problem.add_cost(node, times[position] * priced.at[size])
        for edge in seconds.edges:
            problem.add_edge(edge.first, edge.second, edge.times * edge.seconds.at[size])
        return problem.build("whole")

    expected = problem_at(1)
    found = seconds.at_size(problem_at(0), 1, times)
    np.testing.assert_allclose(found.node_cost, expected.node_cost, rtol=1e-12)
    np.testing.assert_allclose(found.edge_cost, expected.edge_cost, rtol=1e-12)


@pytest.mark.parametrize("shares", [None, (1.0, 0.0, 0.5, 1.0, 0.0, 0.25)])
@pytest.mark.parametrize("seed", range(8))
def test_a_part_is_the_problem_of_its_equations_one_by_one(seed, shares):
    seconds, _ = random_seconds(seed)
    random = np.random.default_rng(seed)
    table = seconds.tables[1].copy()
    table[random.random(len(table)) < 0.1] = np.inf
    inside = random.random(COUNT) < 0.7
    known: dict[Priced, np.ndarray] = {}
    start = 0
    for group in (seconds.costs, seconds.edges):
        for one in group:
            priced = one[-1]
            if priced not in known:
                known[priced] = table[start : start + priced.at[0].size].reshape(priced.at[0].shape)
                start += priced.at[0].size
    problem = ProblemBuilder()

    def node(number):
        return problem.node(number, str(number), [""] * STRATEGIES[number])

    def counted(position, priced):
        share = 1.0 if shares is None else shares[position]
        own = known[priced]
        return share * np.where(np.isinf(own), 0.0, own) + np.where(np.isinf(own), np.inf, 0.0)

    for position, number, priced in seconds.costs:
        if inside[position]:
            problem.add_cost(node(number), counted(position, priced))
    for one in seconds.edges:
        if inside[one.position] and inside[one.home]:
            first, second = node(one.first), node(one.second)
            problem.add_edge(first, second, counted(one.position, one.seconds))
    expected = problem.build("part")
    found = seconds.problem_of(inside, table, None if shares is None else np.array(shares))
    assert found.node_names == expected.node_names
    assert found.strategy_names == expected.strategy_names
    assert (found.num_strategies == expected.num_strategies).all()
    assert (found.edges == expected.edges).all() and (found.live == expected.live).all()
    assert (found.node_cost == expected.node_cost).all()
    assert (found.edge_cost == expected.edge_cost).all()
