"""Every schedule on the workers of the runtime, a process per mesh, with sleeps for kernels."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.skipif(sys.platform != "linux", reason="starts its processes by a fork server")
def test_workers_hold_as_many_buffers_as_the_schedule_says(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from executed_schedules import SCHEDULES, outcomes

    found = list(outcomes(4, SCHEDULES, forward=0.005))
    assert {one.case.schedule for one in found} == set(SCHEDULES) and len(found) >= 7
    for one in found:
        assert one.buffers == one.expected_buffers, one.case
        assert one.executed > 0.95 * one.simulated, one.case  # sleeps and links are not skipped
