"""Simulations as Chrome trace event JSON, which chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_model.simulator import Simulation


def trace_events(
    simulation: Simulation, mesh_names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return trace events in microseconds: a process per mesh, with rows of runs and sends."""
    events: list[dict[str, Any]] = []
    for mesh, timeline in enumerate(simulation.timelines):
        name = mesh_names[mesh] if mesh_names else f"mesh {mesh}"
        events.append({"ph": "M", "pid": mesh, "name": "process_name", "args": {"name": name}})
        for row, label in enumerate(("run", "send")):
            events.append(
                {"ph": "M", "pid": mesh, "tid": row, "name": "thread_name", "args": {"name": label}}
            )
        program = simulation.schedule.programs[mesh]
        for position, start, stop in zip(
            timeline.instructions.tolist(),
            timeline.starts.tolist(),
            timeline.stops.tolist(),
            strict=True,
        ):
            instruction = program[position]
            sends = instruction.kind == "send"
            label = f"to mesh {instruction.peer}" if sends else instruction.task
            if instruction.microbatch is not None:
                label += f" #{instruction.microbatch}"
            events.append(
                {
                    "ph": "X",
                    "pid": mesh,
                    "tid": int(sends),
                    "name": label,
                    "cat": instruction.phase or instruction.kind,
                    "ts": start * 1e6,
                    "dur": (stop - start) * 1e6,
                    "args": {"stage": instruction.stage, "instruction": position},
                }
            )
    return events


def write_trace(
    simulation: Simulation,
    path: str | os.PathLike[str],
    mesh_names: Sequence[str] | None = None,
) -> None:
    """Write the simulation to `path` as a Chrome trace."""
    document = {
        "traceEvents": trace_events(simulation, mesh_names),
        "displayTimeUnit": "ms",
    }
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
