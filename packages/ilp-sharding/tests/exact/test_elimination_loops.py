import itertools

import numpy as np
import pytest

from ilp_sharding.compiled_loops import load
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exceptions import OutOfTime


def _random_elimination(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    sizes = {i: int(rng.integers(1, 5)) for i in range(count)}
    tables: list[dict[int, np.ndarray]] = [{} for _ in range(count)]
    for i, j in itertools.combinations(range(count), 2):
        if rng.random() < 0.4:
            table = rng.random((sizes[i], sizes[j]))
            table[rng.random(table.shape) < 0.1] = np.inf
            tables[i][j], tables[j][i] = table, table.T
    costs = {i: rng.random(sizes[i]) for i in range(count)}
    return Elimination(list(sizes), sizes, tables), costs


def test_compiled_sweeps_give_the_numbers_of_numpy_to_the_last_bit(monkeypatch):
    load("exact.elimination_loops")
    for seed in range(300):
        elimination, costs = _random_elimination(seed)
        compiled = elimination.solve(costs)
        with monkeypatch.context() as patch:
            patch.setattr("ilp_sharding.exact.elimination.loaded", lambda name: False)
            assert elimination.solve(costs) == compiled, seed


def test_a_late_compiled_solve_raises():
    load("exact.elimination_loops")
    elimination, costs = _random_elimination(0)
    with pytest.raises(OutOfTime):
        elimination.solve(costs, until=0.0)
