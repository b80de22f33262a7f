import itertools

import numpy as np
import pytest

from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exact.memory_elimination import TooManyLabels, limited_minimum
from ilp_sharding.exceptions import OutOfTime


def _random_graph(seed, nodes=6):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, nodes + 1))
    sizes = {i: int(rng.integers(1, 4)) for i in range(n)}
    tables: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
    for i, j in itertools.combinations(range(n), 2):
        if rng.random() < 0.5:
            table = rng.integers(0, 20, (sizes[i], sizes[j])).astype(float)
            table[rng.random(table.shape) < 0.2] = np.inf
            tables[i][j], tables[j][i] = table, table.T
    costs = {i: rng.integers(-5, 20, sizes[i]).astype(float) for i in range(n)}
    rows = int(rng.integers(1, 4))
    usage = {i: rng.integers(0, 8, (rows, sizes[i])).astype(float) for i in range(n)}
    return rng, sizes, tables, costs, usage


def _choices(sizes, tables, costs, usage):
    """Yield (cost, usage [rows]) of all choices of finite cost."""
    for choice in itertools.product(*map(range, sizes.values())):
        total = sum(costs[i][k] for i, k in enumerate(choice))
        for i, j in itertools.combinations(range(len(choice)), 2):
            if j in tables[i]:
                total += tables[i][j][choice[i], choice[j]]
        if total < np.inf:
            yield choice, total, sum(usage[i][:, k] for i, k in enumerate(choice))


def test_the_least_cost_within_the_rows_is_that_of_all_choices():
    found = refused = 0
    for seed in range(400):
        rng, sizes, tables, costs, usage = _random_graph(seed)
        elimination = Elimination(list(sizes), sizes, tables)
        every = list(_choices(sizes, tables, costs, usage))
        slack = rng.integers(1, 8, len(usage[0])) * len(sizes) * 0.7
        fitting = {choice: total for choice, total, used in every if (used <= slack).all()}
        best = min(fitting.values(), default=np.inf)
        multipliers = rng.random((int(rng.integers(1, 4)), len(slack))) * 3
        for cutoff in (best + float(rng.integers(0, 9)), best - 1.0, best):
            limit = cutoff if np.isfinite(cutoff) else 1000.0
            answer = limited_minimum(elimination, costs, usage, slack, multipliers, limit)
            if best > limit:
                refused += 1
                assert answer is None, seed
            else:
                found += 1
                assert answer is not None and answer[0] == best, seed
                assert fitting[tuple(answer[1][i] for i in sizes)] == best, seed
    assert found > 200 and refused > 200


def test_limits_of_labels_and_time_are_kept():
    for seed in range(99):
        _, sizes, tables, costs, usage = _random_graph(seed, nodes=6)
        elimination = Elimination(list(sizes), sizes, tables)
        if len(sizes) < 5 or not list(_choices(sizes, tables, costs, usage)):
            continue
        slack = np.full(len(usage[0]), 100.0)
        prices = np.zeros((1, len(slack)))
        with pytest.raises(OutOfTime):
            limited_minimum(elimination, costs, usage, slack, prices, 1e3, until=0.0)
        with pytest.raises(TooManyLabels):
            limited_minimum(elimination, costs, usage, slack, prices, 1e3, most=0)
        return
    raise AssertionError("no graph of five nodes has a choice")
