import numpy as np
import pytest

from alpa_interchange.selection import ShardingProblem
from ilp_sharding import check

PROBLEM = ShardingProblem(
    num_strategies=[1, 2, 3, 2, 1],  # the example of the contest's description
    node_cost=[15, 55, 65, 25, 45, 35, 85, 75, 95],
    node_memory=[10, 25, 25, 15, 20, 15, 10, 10, 15],
    live=[[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
    edges=[[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
    edge_cost=[30, 40, 50, 10, 40, 90, 10, 20, 80, 60, 20, 30, 70, 60],
    memory_limit=50,
)


def test_cost_and_peak_of_the_contest_example():
    # nodes 15 + 55 + 45 + 85 + 95, edges 30 + 10 + 90 + 20 + 70; at time 50: 10 + 25 + 20
    judged = check(PROBLEM, [0, 0, 1, 0, 0])
    assert judged.cost == 515
    assert (judged.peak_memory, judged.peak_time, judged.fits) == (55, 50, False)
    assert check(PROBLEM, [0, 0, 2, 1, 0]).fits


def test_integers_of_any_size_add_up_exactly():
    problem = ShardingProblem(
        num_strategies=[1, 1],
        node_cost=[2**62, 2**62 + 1],
        node_memory=[2**62, 2**62],
        live=[[0, 1], [0, 1]],
        edges=np.zeros((0, 2), int),
        edge_cost=[],
    )
    judged = check(problem, [0, 0])
    assert judged.cost == 2**63 + 1 and judged.peak_memory == 2**63


def test_infinite_entries_are_counted():
    problem = ShardingProblem(
        num_strategies=[2],
        node_cost=[np.inf, 1.0],
        node_memory=[0, 0],
        live=[[0, 1]],
        edges=[[0, 0]],
        edge_cost=[0.0, 5.0, 5.0, 2.0],
    )
    assert not check(problem, [0]).feasible and check(problem, [0]).forbidden == 1
    assert check(problem, [1]).cost == 3.0  # the diagonal of the self-edge


@pytest.mark.parametrize("choice", [[0], [0, 0, 3, 0, 0], [0, -1, 0, 0, 0], [0, 0.5, 0, 0, 0]])
def test_choices_that_do_not_fit_are_refused(choice):
    with pytest.raises(ValueError):
        check(PROBLEM, choice)
