"""Without a deadline work is counted, not time: a busy machine gives the same answer."""

import time

import pytest
from attrs import evolve

from ilp_sharding import SolveOptions, solve


def _crawling(monkeypatch):
    """Let every look at the clock find that a second has passed, as on an overloaded machine."""
    clock = iter(range(1 << 30))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))


@pytest.mark.parametrize(
    ("nodes", "size", "limit", "tolerance"),
    [
        (8, 4, None, 0.0),  # eliminated
        (120, 12, None, 1e-3),  # searched
        (120, 12, 1500.0, 0.0),  # searched under a memory limit
    ],
)
def test_the_answer_does_not_depend_on_the_clock(
    wide_problem, monkeypatch, nodes, size, limit, tolerance
):
    monkeypatch.setattr("ilp_sharding.solver.WorkerPool.start", None)
    problem = wide_problem(0, nodes=nodes, size=size, limit=limit)
    options = SolveOptions(rounds=2, gap_tolerance=tolerance)
    idle = solve(problem, options)
    _crawling(monkeypatch)
    busy = solve(problem, options)
    assert evolve(busy, seconds=0.0) == evolve(idle, seconds=0.0)
