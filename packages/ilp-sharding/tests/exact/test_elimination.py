import itertools

import numpy as np
import pytest

from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exceptions import OutOfTime


def _random_graph(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    sizes = {i: int(rng.integers(1, 4)) for i in range(n)}
    tables: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
    for i, j in itertools.combinations(range(n), 2):
        if rng.random() < 0.5:
            table = rng.integers(0, 20, (sizes[i], sizes[j])).astype(float)
            table[rng.random(table.shape) < 0.2] = np.inf
            tables[i][j], tables[j][i] = table, table.T
    costs = {i: rng.integers(0, 20, sizes[i]).astype(float) for i in range(n)}
    return sizes, tables, costs


def _all_costs(sizes, tables, costs):
    for choice in itertools.product(*map(range, sizes.values())):
        total = sum(costs[i][k] for i, k in enumerate(choice))
        for i, j in itertools.combinations(range(len(choice)), 2):
            if j in tables[i]:
                total += tables[i][j][choice[i], choice[j]]
        yield choice, total


def test_minimum_minimiser_and_min_marginals_are_those_of_all_choices():
    for seed in range(200):
        sizes, tables, costs = _random_graph(seed)
        elimination = Elimination(list(sizes), sizes, tables)
        value, chosen = elimination.solve(costs)
        every = dict(_all_costs(sizes, tables, costs))
        assert value == min(every.values()), seed
        if value < np.inf:
            assert every[tuple(chosen[i] for i in sizes)] == value, seed
            for i, marginal in elimination.min_marginals(costs).items():
                for k in range(sizes[i]):
                    want = min(c for choice, c in every.items() if choice[i] == k)
                    assert marginal[k] == want, seed


def test_a_late_solve_raises():
    sizes, tables, costs = _random_graph(0)
    with pytest.raises(OutOfTime):
        Elimination(list(sizes), sizes, tables).solve(costs, until=0.0)


def test_the_order_stops_at_the_work_limit():
    sizes = dict.fromkeys(range(30), 4)
    table = np.zeros((4, 4))
    tables = [{j: table for j in range(30) if j != i} for i in range(30)]
    assert not Elimination(list(sizes), sizes, tables, work_limit=1e6).complete
