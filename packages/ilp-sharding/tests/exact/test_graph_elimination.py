import itertools

import numpy as np

from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exact.graph_elimination import eliminate
from ilp_sharding.problem.flat_graph import make_tables


def _random_tables(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 9))
    sizes = rng.integers(1, 4, count)
    offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    pairs = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.5]
    tables = [rng.random((sizes[a], sizes[b])) for a, b in pairs]
    for table in tables:
        table[rng.random(table.shape) < 0.15] = np.inf
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    entry = np.concatenate([table.ravel() for table in tables]) if tables else np.zeros(0)
    return make_tables(offset, rng.random(int(offset[-1])), first, second, entry)


def _cost(tables, x):
    total = tables.cost[tables.offset[:-1] + x].sum()
    width = np.diff(tables.offset)[tables.second]
    return (
        total
        + tables.entry[tables.entry_offset[:-1] + x[tables.first] * width + x[tables.second]].sum()
    )


def test_compiled_elimination_finds_the_least_cost_of_all_choices():
    for seed in range(200):
        tables = _random_tables(seed)
        sizes = np.diff(tables.offset)
        x = np.zeros(len(sizes), dtype=np.int64)
        found = eliminate(tables, 1e9, x)
        every = itertools.product(*map(range, sizes))
        best = min(_cost(tables, np.array(choice, dtype=np.int64)) for choice in every)
        if best == np.inf:
            assert found == np.inf, seed
        else:
            assert abs(found - best) <= 1e-12 and abs(_cost(tables, x) - best) <= 1e-12, seed


def test_an_elimination_past_its_limit_is_left():
    nodes, size = 10, 4
    pairs = np.array(list(itertools.combinations(range(nodes), 2)))
    entry = np.random.default_rng(0).random(len(pairs) * size * size)
    tables = make_tables(
        np.arange(nodes + 1) * size, np.zeros(nodes * size), pairs[:, 0], pairs[:, 1], entry
    )
    x = np.zeros(nodes, dtype=np.int64)
    assert np.isnan(eliminate(tables, 1e4, x))  # of all nodes alike: the first table has 4^10
    sizes = dict.fromkeys(range(nodes), size)
    whole = [dict.fromkeys((j for j in range(nodes) if j != i), entry) for i in range(nodes)]
    assert Elimination(range(nodes), sizes, whole, plan_only=True).work > 1e4
