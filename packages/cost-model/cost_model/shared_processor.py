"""Simulates meshes that share one processor, such as XLA host devices on the cores of one machine.

With n meshes, a task's seconds are stated for all n busy at once, so it needs t / n seconds of the
whole. While k meshes run, each gets 1 / k of it and progresses n / k times as fast: bubbles
of a pipeline cost nothing as long as somebody computes (processor sharing). Transfers take their
stated time whatever runs beside them.

    remaining_i decreases at rate n / k    the next event is the first end of a run or the first
                                           arrival that lets an idle mesh start -> simulate_shared()
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from alpa_interchange.schedule import PipelineSchedule
from cost_model.simulator import Execution, Simulation, Transfers, transfer_function


def simulate_shared(
    schedule: PipelineSchedule,
    task_seconds: Mapping[str, float],
    transfer_seconds: Transfers = None,
    *,
    value_bytes: Mapping[str, float] | None = None,
    task_bytes: Mapping[str, float] | None = None,
    initial_bytes: tuple[float, ...] | None = None,
) -> Simulation:
    """Return the simulation of one step when all meshes share one processor.

    Arguments as in `simulate`. `busy_seconds` is the time during which a mesh had a task running,
    which is longer than its work where others ran beside it.
    """
    execution = _SharedExecution(
        schedule,
        task_seconds,
        transfer_function(transfer_seconds),
        value_bytes or {},
        task_bytes or {},
        initial_bytes,
        False,
    )
    return execution.shared_result()


class _SharedExecution(Execution):
    """Steps all meshes together in the order of time."""

    def shared_result(self) -> Simulation:
        programs = self.schedule.programs
        count = len(programs)
        now = 0.0
        started: dict[int, float] = {}
        remaining: dict[int, float] = {}
        while True:
            waiting = self._start_ready(now, started, remaining)
            if not remaining and waiting == math.inf:
                if any(self.position[mesh] < len(programs[mesh]) for mesh in range(count)):
                    raise ValueError(self.deadlock(range(count)))
                return self.summary()
            rate = count / len(remaining) if remaining else 0.0
            first_end = min(remaining.values()) / rate if remaining else math.inf
            passed = min(first_end, waiting - now)
            now += passed
            for mesh in list(remaining):
                remaining[mesh] -= passed * rate
                if remaining[mesh] <= 1e-12 * max(1.0, now):
                    del remaining[mesh]
                    self._finish(mesh, started.pop(mesh), now)

    def _start_ready(
        self, now: float, started: dict[int, float], remaining: dict[int, float]
    ) -> float:
        """Start every run that can start at `now`; return when the next input arrives by itself."""
        waiting, moved = math.inf, True
        while moved:
            moved, waiting = False, math.inf
            for mesh, program in enumerate(self.schedule.programs):
                if mesh in remaining:
                    continue
                before = self.position[mesh]
                self.advance(mesh, until_run=True)
                moved |= self.position[mesh] != before
                if self.position[mesh] == len(program):
                    continue
                instruction = program[self.position[mesh]]
                if instruction.kind != "run":
                    continue
                ready = self.ready[mesh]
                start = max((ready.get(name, 0.0) for name in instruction.inputs), default=0.0)
                if start > now:
                    waiting = min(waiting, start)
                    continue
                started[mesh] = now
                remaining[mesh] = self.seconds_of(mesh, instruction)
        return waiting

    def _finish(self, mesh: int, start: float, end: float) -> None:
        position = self.position[mesh]
        instruction = self.schedule.programs[mesh][position]
        self.record_run(mesh, position, instruction, start, end)
        self.position[mesh] += 1
