"""What stages wait for transfers, as the traces of two workers of `mesh-runtime` show it.

    python benchmarks/exposed_transfers.py [--step SECONDS] [--trace FILE]

The two-stage settings of `benchmarks/transfers.py` (GPT 2.6B and U-Transformer 2B of arXiv
2211.05322), under 1F1B and eager-1F1B: two processes, each a `MeshWorker` with a `HostTransport`
whose link is slowed down to what the broadcast plan takes; a task is a wait of its length. A
worker's trace has its runs, and the waits for what a run reads that has not arrived. The part of a
wait that is after the run which made the value is an exposed transfer. Both schedules run in turns;
times are those of the setting (the execution is shortened by one factor), medians of three steps.
`--trace` writes the last steps in the format of chrome://tracing and Perfetto.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table
from transfers import MIB, Setting, SlowLink, gpt, instructions, move, two_stages, u_transformer

from alpa_interchange.schedule import PipelineSchedule
from cost_model import simulate
from resharding import HostTransport

SCHEDULES = ("1f1b", "eager-1f1b")
NUM_BYTES = 4 * MIB  # of what is sent in place of a boundary
TURNS = 3


@frozen
class Event:
    """What a worker did: the kind of instruction, its task, what it wrote, and when (seconds)."""

    kind: str
    task: str
    outputs: tuple[str, ...]
    start: float
    stop: float


def work(
    pipe: Connection,
    stage: int,
    token: bytes,
    schedules: Mapping[str, PipelineSchedule],
    seconds: Mapping[str, float],
    crossing: float,
) -> None:
    """Run the steps that are asked for on one worker; answer the events of each."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mesh_runtime.layout import HostTiles, Layout
    from mesh_runtime.transfers import device_owners
    from mesh_runtime.worker import MeshWorker
    from mesh_runtime.worker_mesh import WorkerMesh, worker_name
    from mesh_runtime.worker_types import WorkerProgram, WorkerStep, own_list

    meshes = [WorkerMesh(shape=(1,), axis_names=("x",), num_hosts=1)] * 2
    link = SlowLink(worker_name(stage, 0), token)
    link.rate = NUM_BYTES / crossing
    transport = HostTransport(worker_name(stage, 0), token, link=link)
    worker = MeshWorker(stage, 0, meshes, transport)
    pipe.send(transport.address)
    transport.connect({worker_name(1 - stage, 0): pipe.recv()}, device_owners(meshes))
    array = jnp.ones(NUM_BYTES, jnp.uint8)

    def task(length: float) -> Callable[..., list[jax.Array]]:
        def run(_: object) -> list[jax.Array]:
            time.sleep(length)
            return [array]

        return run

    layout = Layout((1,), ("x",), (None,))
    given = HostTiles((1,), [(((0, 1),), np.ones(1, np.uint8))])
    placed: dict[str, dict[str, HostTiles]] = {}
    for name, schedule in schedules.items():
        program = schedule.programs[stage]
        written = {buffer for each in program for buffer in each.outputs}
        read = {buffer for each in program for buffer in each.inputs}
        placed[name] = dict.fromkeys(sorted(read - written), given)
        worker.load(
            WorkerProgram(
                plan=name,
                schedule=own_list(schedule, stage),
                executables={task_: task(length) for task_, length in seconds.items()},
                layouts=dict.fromkeys(("h", "d", "xh", "xd"), layout),
                timeout=120.0,
            )
        )
        worker.route(name, {("h", 0, 1): move(NUM_BYTES, 0, 1), ("d", 1, 0): move(NUM_BYTES, 1, 0)})
    pipe.send("ready")
    number = 0
    while (name := pipe.recv()) is not None:
        step = WorkerStep(
            plan=name,
            number=number,
            bound={},
            placed=placed[name],
            kept={},
            returned=(),
            trace="blocking",
        )
        number += 1
        _, trace, _ = worker.step(step)
        program = schedules[name].programs[stage]
        pipe.send(
            [
                Event(program[k].kind, program[k].task or "", program[k].outputs, start, stop)
                for k, start, stop in trace
            ]
        )
    worker.close()


def executed(
    schedules: Mapping[str, PipelineSchedule], seconds: Mapping[str, float], crossing: float
) -> dict[str, list[list[list[Event]]]]:
    """Return the events of each turn and stage, by schedule."""
    pipes, processes = two_stages(work, schedules, seconds, crossing)
    found: dict[str, list[list[list[Event]]]] = {name: [] for name in schedules}
    for turn in range(TURNS + 1):
        for name, turns in found.items():
            for pipe in pipes:
                pipe.send(name)
            events = [pipe.recv() for pipe in pipes]
            if turn:  # in the first, memory is touched for the first time
                turns.append(events)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return found


def length_of(stages: Sequence[Sequence[Event]]) -> float:
    """Return the seconds from the first event of a step to the last."""
    every = [event for events in stages for event in events]
    return max(event.stop for event in every) - min(event.start for event in every)


def waits_of(stages: Sequence[Sequence[Event]]) -> tuple[float, float]:
    """Return the seconds that a stage waits for values, and those of them after the value was made,
    on average over the stages."""
    made = {
        name: event.stop
        for events in stages
        for event in events
        if event.kind == "run"
        for name in event.outputs
    }
    waits = [event for events in stages for event in events if event.kind == "receive"]
    waited = sum(event.stop - event.start for event in waits)
    exposed = sum(
        max(0.0, event.stop - max(event.start, made[event.outputs[0]])) for event in waits
    )
    return waited / len(stages), exposed / len(stages)


def report(setting: Setting, step_seconds: float) -> dict[str, list[list[Event]]]:
    """Print the table of a setting; return the events of the last step of each schedule."""
    tasks = {f"forward{k}": setting.forward[k] for k in range(2)}
    tasks |= {f"backward{k}": setting.backward[k] for k in range(2)}
    crossing = setting.crossing["broadcast"]
    schedules = {name: instructions(name, setting.num_microbatches) for name in SCHEDULES}
    simulated = {
        name: simulate(schedule, tasks, {"h": crossing, "d": crossing})
        for name, schedule in schedules.items()
    }
    shorter = min(1.0, step_seconds / simulated["1f1b"].step_seconds)
    short = {task: seconds * shorter for task, seconds in tasks.items()}
    found = executed(schedules, short, crossing * shorter)
    table = Table(title=f"{setting.name}: seconds, by the trace of two workers")
    for name in ("schedule", "step", "simulated", "waits", "exposed", "exposed, simulated"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for name, turns in found.items():
        step = statistics.median(length_of(stages) for stages in turns) / shorter
        waited, exposed = (
            statistics.median(waits_of(stages)[k] for stages in turns) / shorter for k in range(2)
        )
        table.add_row(
            name,
            f"{step:.2f}",
            f"{simulated[name].step_seconds:.2f}",
            f"{waited:.2f}",
            f"{exposed:.2f}",
            f"{sum(simulated[name].exposed_seconds) / 2:.2f}",
        )
    Console(width=110).print(table)
    return {name: turns[-1] for name, turns in found.items()}


def write_trace(path: Path, found: Mapping[str, Mapping[str, Sequence[Sequence[Event]]]]) -> None:
    """Write events as a file for trace viewers: a process for each schedule, a row for each
    stage."""
    made = []
    for setting, by_schedule in found.items():
        for schedule, stages in by_schedule.items():
            begin = min(event.start for events in stages for event in events)
            for stage, events in enumerate(stages):
                for event in events:
                    made.append(
                        {
                            "ph": "X",
                            "name": event.task or f"{event.kind} {' '.join(event.outputs)}",
                            "pid": f"{setting}, {schedule}",
                            "tid": f"stage {stage}",
                            "ts": (event.start - begin) * 1e6,
                            "dur": (event.stop - event.start) * 1e6,
                        }
                    )
    path.write_text(json.dumps({"traceEvents": made}))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step", type=float, default=4.0, help="seconds of an executed step")
    parser.add_argument("--trace", type=Path, help="JSON file to write the last steps into")
    given = parser.parse_args()
    found = {each.name: report(each, given.step) for each in (gpt(), u_transformer())}
    if given.trace is not None:
        write_trace(given.trace, found)


if __name__ == "__main__":
    main()
