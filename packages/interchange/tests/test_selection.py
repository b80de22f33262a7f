"""Selection problems: what is refused, infinite costs, gaps."""

from typing import Any

import numpy as np
import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.selection import ShardingProblem, ShardingSolution


def problem(**changes: object) -> ShardingProblem:
    """Return two nodes of 2 and 3 strategies with one edge."""
    fields: dict[str, Any] = {
        "num_strategies": [2, 3],
        "node_cost": [0.0, 1.0, np.inf, 2.0, 3.0],
        "node_memory": [10, 20, 1, 2, 3],
        "live": [[0, 1], [0, 1]],
        "edges": [[0, 1]],
        "edge_cost": np.arange(6.0),
    }
    return ShardingProblem(**{**fields, **changes})


def test_a_problem_counts_its_nodes_and_edges() -> None:
    assert (problem().num_nodes, problem().num_edges) == (2, 1)
    alone = problem(edges=np.zeros((0, 2)), edge_cost=[])
    assert alone.num_edges == 0


def test_problems_are_equal_when_their_arrays_are() -> None:
    assert problem() == problem()
    assert problem() != problem(node_memory=[10, 20, 1, 2, 4])


def test_integer_costs_stay_integers() -> None:
    assert problem(node_cost=[0, 1, 2, 3, 4]).node_cost.dtype == np.int64
    assert problem().node_memory.dtype == np.int64
    assert problem().node_cost.dtype == np.float64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_strategies": [2, 0]}, "every node needs at least one strategy"),
        ({"node_cost": [1.0, 2.0]}, r"node_cost must have 5 entries .* got shape \(2,\)"),
        ({"node_cost": [np.nan] * 5}, "node_cost must not hold NaN"),
        ({"node_memory": [1, 1, 1, 1, -1]}, "node_memory must not be negative"),
        ({"live": [[0, 1]]}, r"live must be \[2, 2\]"),
        ({"edges": [[0, 2]]}, r"edges must name nodes 0\.\.1"),
        ({"edges": [[-1, 0]]}, r"edges must name nodes 0\.\.1"),
        ({"edge_cost": np.arange(5.0)}, "edge_cost must have 6 entries"),
        ({"edge_cost": [np.nan] * 6}, "edge_cost must not hold NaN"),
    ],
)
def test_impossible_problems_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem(**changes)


def test_a_problem_survives_a_round_trip_with_its_infinities() -> None:
    value = problem(memory_limit=25.0, node_names=("a", "b"), strategy_names=(("r",), ("s", "t")))
    assert from_json(to_json(value), ShardingProblem) == value


def solution(objective: float | None, bound: float | None) -> ShardingSolution:
    return ShardingSolution(
        choice=(0,), objective=objective, lower_bound=bound, status="feasible", seconds=0.1
    )


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(12.0, 10.0, 0.2), (10.0, 10.0, 0.0), (9.0, 10.0, 0.0), (None, 10.0, None), (1.0, None, None)],
)
def test_the_gap_is_the_relative_distance_to_the_bound(
    objective: float | None, bound: float | None, gap: float | None
) -> None:
    assert solution(objective, bound).gap == (gap if gap is None else pytest.approx(gap))


def test_solutions_survive_a_round_trip() -> None:
    value = solution(12.0, 10.0)
    assert from_json(to_json(value), ShardingSolution) == value
