"""Executed and predicted lanes of a step as a trace for Perfetto (ui.perfetto.dev) or Chrome."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from alpa_interchange import Instruction
from alpa_meta.types import Fields
from mesh_runtime import TraceEvent

_MICROSECONDS = 1e6  # the unit of the format
_TRANSFERS = 1000  # lanes of sends and receives stand apart from those of runs


def write_trace(path: Path, lanes: Mapping[str, Sequence[TraceEvent]]) -> None:
    """Write events in the Trace Event Format, a process for each name of `lanes`, at once."""
    events: list[dict[str, object]] = []
    for number, (name, found) in enumerate(lanes.items()):
        events += _lane(number, name, found)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    os.replace(partial, path)


def read_trace(path: Path) -> list[TraceEvent]:
    """Return the events of a file that `write_trace` wrote of one lane; ValueError for another."""
    try:
        found = json.loads(path.read_text())["traceEvents"]
        return [_event(one) for one in found if one["ph"] == "X"]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: is not the trace of an executed step: {error!r}") from None


def _lane(number: int, name: str, events: Sequence[TraceEvent]) -> list[dict[str, object]]:
    made: list[dict[str, object]] = [_named("process_name", number, 0, name)]
    origin = min((event.start for event in events), default=0.0)
    for mesh in sorted({event.mesh for event in events}):
        made.append(_named("thread_name", number, mesh, f"mesh {mesh}"))
        made.append(_named("thread_name", number, mesh + _TRANSFERS, f"mesh {mesh} transfers"))
    for event in events:
        one = event.instruction
        if one.kind == "free":
            continue
        lane = event.mesh if one.kind == "run" else event.mesh + _TRANSFERS
        made.append(
            {
                "name": _title(one),
                "cat": one.phase or one.kind,
                "ph": "X",
                "ts": (event.start - origin) * _MICROSECONDS,
                "dur": (event.stop - event.start) * _MICROSECONDS,
                "pid": number,
                "tid": lane,
                "args": {
                    "kind": one.kind,
                    "mesh": event.mesh,
                    "task": one.task,
                    "phase": one.phase,
                    "stage": one.stage,
                    "microbatch": one.microbatch,
                    "peer": one.peer,
                    "inputs": list(one.inputs),
                    "outputs": list(one.outputs),
                },
            }
        )
    return made


def _title(one: Instruction) -> str:
    what = one.task if one.kind == "run" else f"{one.kind} mesh {one.peer}"
    return what if one.microbatch is None else f"{what} #{one.microbatch}"


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(one: Fields) -> TraceEvent:
    args = one["args"]
    instruction = Instruction(
        kind=args["kind"],
        task=args["task"],
        phase=args["phase"],
        stage=args["stage"],
        microbatch=args["microbatch"],
        peer=args["peer"],
        inputs=tuple(args["inputs"]),
        outputs=tuple(args["outputs"]),
    )
    start = float(one["ts"]) / _MICROSECONDS
    return TraceEvent(int(args["mesh"]), instruction, start, start + one["dur"] / _MICROSECONDS)
