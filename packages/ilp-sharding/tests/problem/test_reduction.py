import itertools

import numpy as np
import pytest
from attrs import evolve

from ilp_sharding import SolveOptions
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.reduction import Network


def _choices(network, nodes):
    return itertools.product(*(range(len(network.cost[i])) for i in nodes))


def test_reduction_keeps_every_finite_choice_and_its_cost(random_problem):
    for seed in range(400):
        problem = random_problem(seed)
        instance = Instance.of(problem, SolveOptions())
        before = {}
        for choice in itertools.product(*map(range, problem.num_strategies)):
            cost = instance.objective(np.array(choice))
            if cost < np.inf:
                before[choice] = cost
        network = Network(instance)
        try:
            network.reduce()
        except NoAssignment:
            assert not before, seed
            continue
        nodes = network.open_nodes()
        after = {}
        for positions in _choices(network, nodes):
            full = network.expand(dict(zip(nodes, positions)))
            cost = network.constant() + sum(
                float(network.cost[i][p]) for i, p in zip(nodes, positions)
            )
            for (i, p), (j, q) in itertools.combinations(zip(nodes, positions), 2):
                if j in network.tables[i]:
                    cost += float(network.tables[i][j][p, q])
            if cost < np.inf:
                after[tuple(full.tolist())] = cost
        assert after.keys() == before.keys(), seed
        for choice, cost in before.items():
            assert after[choice] == pytest.approx(cost, rel=1e-12, abs=1e-15), seed


def test_a_chain_of_one_to_one_tables_contracts_into_one_node():
    eye = np.where(np.eye(4, dtype=bool), 0.0, np.inf).ravel()
    instance = _chain(30, 4, eye)
    network = Network(instance)
    network.reduce()
    assert len(network.open_nodes()) == 1


def test_separable_tables_disappear():
    table = np.add.outer([1.0, 2.0, 7.0], [0.5, 3.0, 4.0]).ravel()
    network = Network(_chain(5, 3, table))
    network.reduce()
    assert all(not tables for tables in network.tables)


def test_parallel_tables_that_add_up_to_a_separable_one_disappear():
    table = np.array([0.0, 1.0, 1.0, 0.0])
    instance = evolve(
        _chain(2, 2, table),
        edges=np.array([[0, 1], [0, 1]]),
        table_offset=np.array([0, 4, 8]),
        table=np.concatenate([table, 1.0 - table]),
    )
    network = Network(instance)
    network.reduce()
    assert all(not tables for tables in network.tables)


def test_long_chains_need_no_deep_recursion():
    eye = np.where(np.eye(2, dtype=bool), 0.0, np.inf).ravel()
    network = Network(_chain(20_000, 2, eye))
    network.reduce()
    assert len(network.open_nodes()) == 1 and len(network.expand({})) == 20_000


def _chain(length, size, table):
    return Instance(
        offset=np.arange(length + 1) * size,
        cost=np.tile(np.arange(size, dtype=float), length),
        memory=np.zeros(length * size),
        start=np.zeros(length, int),
        stop=np.zeros(length, int),
        edges=np.array([[i, i + 1] for i in range(length - 1)]),
        table_offset=np.arange(length) * size * size,
        table=np.tile(table, length - 1),
        limit=np.inf,
        integral=True,
        huge_floor=np.inf,
    )
