"""Bounds of layers in a row against all choices, and what is read from afar."""

import itertools

import numpy as np
import pytest

from alpa_interchange import ShardingProblem
from alpa_meta import Options
from alpa_meta.inter_op.layer_runs import first_in_a_run, in_a_run, potential, span
from alpa_meta.intra_op.memory_limit import solve

NODES, CHOICES = 3, 3


def random_layer(seed):
    """A layer of three nodes in a chain, and what the next one reads of the last and the first."""
    rng = np.random.default_rng(seed)
    node_cost = rng.uniform(0, 1, size=(NODES, CHOICES))
    node_cost[0, 0] = np.inf if seed % 3 == 0 else node_cost[0, 0]
    edges = [(k, k + 1) for k in range(NODES - 1)]
    tables = [rng.uniform(0, 1, size=(CHOICES, CHOICES)) for _ in edges]
    alone = ShardingProblem(
        num_strategies=[CHOICES] * NODES,
        node_cost=node_cost.ravel(),
        node_memory=np.zeros(NODES * CHOICES),
        live=np.zeros((NODES, 2), dtype=np.int64),
        edges=edges,
        edge_cost=np.concatenate([table.ravel() for table in tables]),
    )
    links = [
        (before, after, rng.uniform(0, 1) * (1 - np.eye(CHOICES)[rng.permutation(CHOICES)]))
        for before, after in ((NODES - 1, 0), (0, NODES - 1))
    ]
    return alone, links


def least_of_run(alone, links, count):
    """The least seconds of `count` layers in a row, over all choices."""
    ways = list(itertools.product(range(CHOICES), repeat=NODES))
    tables = alone.edge_cost.reshape(-1, CHOICES, CHOICES)
    costs = alone.node_cost.reshape(NODES, CHOICES)
    own = np.array(
        [
            sum(costs[node, one] for node, one in enumerate(way))
            + sum(table[way[a], way[b]] for (a, b), table in zip(alone.edges, tables, strict=True))
            for way in ways
        ]
    )
    between = np.array(
        [[sum(t[one[a], two[b]] for a, b, t in links) for two in ways] for one in ways]
    )
    best = own
    for _ in range(count - 1):
        best = (best[:, None] + between).min(axis=0) + own
    return float(best.min())


def bound_of(problem):
    bound = solve(problem, Options()).lower_bound
    assert bound is not None
    return bound


@pytest.mark.parametrize("seed", range(30))
def test_no_run_of_layers_takes_less_than_its_bound(seed):
    alone, links = random_layer(seed)
    least = bound_of(alone)
    numbers = potential(alone, links, {}, least, Options(), 1e-6)
    if not numbers:
        return

    inside = bound_of(in_a_run(alone, links, numbers)) - span(numbers)
    assert inside > least
    first = bound_of(first_in_a_run(alone, numbers))
    last = bound_of(in_a_run(alone, links, numbers, last=True)) - span(numbers)
    for count in range(2, 6):
        bound = first + (count - 2) * inside + last
        assert bound <= least_of_run(alone, links, count) * (1 + 1e-9)


def test_the_numbers_raise_the_bound_of_most_layers():
    raised = []
    for seed in range(30):
        alone, links = random_layer(seed)
        least = bound_of(alone)
        far = (least_of_run(alone, links, 61) - least_of_run(alone, links, 1)) / 60
        if far <= least * 1.001:
            continue
        numbers = potential(alone, links, {}, least, Options(), 1e-6)
        problem = in_a_run(alone, links, numbers) if numbers else alone
        more = bound_of(problem) - span(numbers) - least
        raised.append(more / (far - least))
    assert len(raised) > 10
    assert np.mean(raised) > 0.5
