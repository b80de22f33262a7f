"""The simulated schedule of a plan as the events of a step, to be drawn."""

from __future__ import annotations

from alpa_interchange import ParallelPlan
from alpa_meta.report.predicted_simulation import predicted_simulation
from mesh_runtime import TraceEvent


def predicted_events(plan: ParallelPlan) -> list[TraceEvent]:
    """Return the schedule of `plan` simulated with the predicted times of stages and transfers."""
    simulation = predicted_simulation(plan)
    return [
        TraceEvent(mesh, simulation.schedule.programs[mesh][position], float(start), float(stop))
        for mesh, timeline in enumerate(simulation.timelines)
        for position, start, stop in zip(
            timeline.instructions, timeline.starts, timeline.stops, strict=True
        )
    ]
