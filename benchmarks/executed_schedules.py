"""Executed simulation: the workers of the runtime with sleeps for kernels, one process per mesh.

    python benchmarks/executed_schedules.py [--meshes 4 16 64] [--forward 0.2]
        [--schedules 1f1b ...] [--per-mesh 2]

Every mesh is a process with the worker and the transport that Ray workers have. A kernel is a sleep
of its length, on the average, and values cross sockets that are no faster than a rate. So many
processes on few cores do not disturb each other, and what is measured is the schedule, the
instruction lists and the transfers. The makespan is compared with that of the event simulator, the
most buffers that a worker holds with what the schedule says.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from attrs import frozen
from rich.console import Console
from rich.table import Table
from transfers import move

from alpa_interchange.reshard import ReshardingPlan
from alpa_interchange.schedule import Instruction, PipelineSchedule, TaskGraph, TaskSpec
from cost_model import simulate
from mesh_runtime.layout import Layout
from mesh_runtime.order import value_name
from mesh_runtime.transfers import Moves, device_owners
from mesh_runtime.worker import MeshWorker
from mesh_runtime.worker_mesh import WorkerMesh, worker_name
from mesh_runtime.worker_types import WorkerProgram, WorkerStep, own_list
from resharding import HostTransport, new_token
from resharding.socket_link import SocketLink
from stage_dp import SCHEDULE_RULES, adaptive_warmups, emit

SCHEDULES = tuple(name for name, rule in SCHEDULE_RULES.items() if rule.has_backward)
NUM_BYTES = 1 << 17  # of a value: above what offers carry, so that it is fetched through a socket
FORWARD = 0.2
"""Seconds of a forward: a process that wakes up late on a busy machine is late by milliseconds, and
the steps of 4 meshes by up to 9 % with forwards of 0.05 s, by up to 1.4 % with these."""
MANY = 16
"""Meshes above which each has one microbatch instead of two: the steps of 64 meshes take 60 to 90 s
so, and the seven schedules 11 minutes."""
CHUNKS = 2  # of a mesh, where a schedule interleaves


@frozen(kw_only=True)
class Case:
    """A schedule on some meshes; seconds of a forward of a mesh, and of a crossing."""

    schedule: str
    num_meshes: int
    num_microbatches: int
    forward: float
    crossing: float


@frozen(kw_only=True)
class Outcome:
    """Seconds of a step, simulated and executed, and the most buffers of each mesh."""

    case: Case
    simulated: float
    executed: float
    expected_buffers: tuple[int, ...]
    buffers: tuple[int, ...]

    @property
    def ratio(self) -> float:
        return self.executed / self.simulated


# ---------------------------------------------------------------------- what is run


def graph_of(case: Case) -> TaskGraph:
    """Return the forwards and backwards of a chain of stages."""
    rule, count = SCHEDULE_RULES[case.schedule], case.num_meshes
    num_stages = count * (CHUNKS if rule.interleaves else 1)
    tasks = []
    for stage in range(num_stages):
        here: dict[str, Any] = {"mesh": stage % count, "stage": stage}
        first, last = stage == 0, stage == num_stages - 1
        tasks.append(
            TaskSpec(
                name=f"forward{stage}",
                phase="forward",
                inputs=() if first else (f"h{stage - 1}",),
                outputs=(f"kept{stage}",) if last else (f"h{stage}", f"kept{stage}"),
                **here,
            )
        )
        read = (f"kept{stage}",) if last else (f"kept{stage}", f"d{stage + 1}")
        made = () if first else (f"d{stage}",)
        phase = "backward_input" if rule.splits_backward else "backward"
        rest = (f"left{stage}",) if rule.splits_backward else ()
        tasks.append(
            TaskSpec(name=f"{phase}{stage}", phase=phase, inputs=read, outputs=made + rest, **here)
        )
        if rule.splits_backward:
            tasks.append(
                TaskSpec(
                    name=f"backward_weight{stage}",
                    phase="backward_weight",
                    inputs=rest,
                    outputs=(),
                    **here,
                )
            )
    return TaskGraph(tasks=tuple(tasks), per_step=(), inputs=(), home=(), outputs=())


def lists_of(case: Case) -> tuple[PipelineSchedule, dict[str, float]]:
    """Return the instruction lists, and the seconds of each task: a backward takes two forwards."""
    graph = graph_of(case)
    warmups = None
    if case.schedule == "adaptive":
        crossings = [case.crossing] * (case.num_meshes - 1)
        warmups = adaptive_warmups(crossings, 3 * case.forward, case.num_microbatches)
    share = CHUNKS if SCHEDULE_RULES[case.schedule].interleaves else 1
    seconds = {
        task.name: case.forward / share * (2 if task.phase == "backward" else 1)
        for task in graph.tasks
    }
    return emit(graph, case.schedule, case.num_microbatches, warmups=warmups), seconds


def moves_of(schedule: PipelineSchedule) -> Moves:
    """Return the plan of every value that is sent: whole, from one device to another."""
    plans: dict[tuple[int, int], ReshardingPlan] = {}
    moves: Moves = {}
    for source, program in enumerate(schedule.programs):
        for each in program:
            if each.kind != "send" or each.peer is None:
                continue
            pair = source, each.peer
            if pair not in plans:
                plans[pair] = move(NUM_BYTES, *pair)
            moves.update(((value_name(name), *pair), plans[pair]) for name in each.inputs)
    return moves


# ---------------------------------------------------------------------- the process of a mesh


class SlowLink(SocketLink):
    """A link that fetches through sockets, from each peer one value at a time and no faster than
    in `seconds`."""

    most_inline = 0
    seconds = 0.0

    def __init__(self, name: str, token: bytes) -> None:
        self.sleepers: dict[str, Sleeper] = {}
        super().__init__(name, token)

    def lanes(self, peer: str) -> int:
        return 1

    def reads(self, peer: str) -> bool:
        return False

    def shares(self, peer: str) -> bool:
        return False

    def fetch(
        self, peer: str, key: str, number: int, begin: int, views: Sequence[memoryview]
    ) -> None:
        start = time.perf_counter()
        super().fetch(peer, key, number, begin, views)
        sleeper = self.sleepers.setdefault(peer, Sleeper())
        sleeper.sleep(max(0.0, start + self.seconds - time.perf_counter()))


class Sleeper:
    """Sleeps as long as asked for on the average: what one sleep took longer is taken off the
    next."""

    def __init__(self) -> None:
        self._late = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        start = time.perf_counter()
        time.sleep(max(0.0, seconds - self._late))
        self._late += time.perf_counter() - start - seconds


def kernel(
    sleeper: Sleeper, seconds: float, num_outputs: int, array: jax.Array
) -> Callable[..., Any]:
    """Return what takes so long and gives an array for each output."""
    made = (array,) * num_outputs

    def run(*_: Any) -> Any:
        sleeper.sleep(seconds)
        return made

    return run


def work(pipe: Connection, mesh: int, num_meshes: int, token: bytes) -> None:
    """Be the worker of a mesh for the cases that come, until there are no more."""
    with suppress(PermissionError):
        os.nice(-10)  # sleepers that are late because of other programs say nothing of schedules
    meshes = [WorkerMesh(shape=(1,), axis_names=("x",), num_hosts=1)] * num_meshes
    owners = device_owners(meshes)
    link = SlowLink(worker_name(mesh, 0), token)
    transport = HostTransport(worker_name(mesh, 0), token, link=link)
    worker = MeshWorker(mesh, 0, meshes, transport, jax.devices()[:1])
    array = jax.block_until_ready(jax.numpy.ones(NUM_BYTES, np.uint8))
    pipe.send(transport.address)
    transport.connect(pipe.recv(), owners)
    number = 0
    while (part := pipe.recv()) is not None:
        for plan_name, factor in (("warm", 0.0), ("timed", 1.0)):
            sleeper = Sleeper()
            tasks = {
                task: kernel(sleeper, factor * seconds, num_outputs, array)
                for task, (seconds, num_outputs) in part.tasks.items()
            }
            link.seconds = factor * part.crossing
            worker.load(
                WorkerProgram(
                    plan=plan_name,
                    schedule=part.schedule,
                    executables=tasks,
                    layouts=part.layouts,
                    timeout=600.0,
                )
            )
            worker.route(plan_name, part.moves)
            pipe.send("ready")
            time.sleep(max(0.0, pipe.recv() - time.monotonic()))
            number += 1
            step = WorkerStep(
                plan=plan_name, number=number, bound={}, placed={}, kept={}, returned=()
            )
            worker.step(step)
            pipe.send((time.monotonic(), worker.most_held))
            worker.unload(plan_name)
    transport.close()


@frozen(kw_only=True)
class Part:
    """What a process is given of a case: `tasks` are seconds and numbers of outputs."""

    schedule: str
    tasks: Mapping[str, tuple[float, int]]
    layouts: Mapping[str, Layout]
    moves: Moves
    crossing: float


def layouts_of(program: Iterable[Instruction]) -> dict[str, Layout]:
    """Return the layouts of what a mesh receives."""
    return {
        value_name(name): Layout((1,), ("x",))
        for each in program
        if each.kind == "receive"
        for name in each.outputs
    }


# ---------------------------------------------------------------------- all of them


@contextmanager
def processes(num_meshes: int) -> Iterator[list[Connection]]:
    """Give the pipes to a process for each mesh, which know one another."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["executed_schedules"])  # imports jax once
    token, pipes, started = new_token(), [], []
    for mesh in range(num_meshes):
        ours, theirs = context.Pipe()
        started.append(context.Process(target=work, args=(theirs, mesh, num_meshes, token)))
        started[-1].start()
        theirs.close()
        pipes.append(ours)
    addresses = {worker_name(mesh, 0): pipe.recv() for mesh, pipe in enumerate(pipes)}
    for pipe in pipes:
        pipe.send(addresses)
    try:
        yield pipes
    finally:
        for pipe, process in zip(pipes, started, strict=True):
            with suppress(OSError):
                pipe.send(None)
            process.join(10)
            process.kill()


def executed(pipes: Sequence[Connection], case: Case) -> Outcome:
    """Return what a case takes, simulated and on the processes."""
    schedule, seconds = lists_of(case)
    values = {
        value_name(name)
        for program in schedule.programs
        for each in program
        for name in (*each.inputs, *each.outputs)
    }
    expected = simulate(
        schedule,
        seconds,
        lambda source, target, value: case.crossing,
        value_bytes=dict.fromkeys(values, 1.0),
    )
    moves = moves_of(schedule)
    for mesh, (pipe, program) in enumerate(zip(pipes, schedule.programs, strict=True)):
        runs = {each.task: each for each in program if each.kind == "run"}
        pipe.send(
            Part(
                schedule=own_list(schedule, mesh),
                tasks={task: (seconds[task], len(run.outputs)) for task, run in runs.items()},
                layouts=layouts_of(program),
                moves={key: plan for key, plan in moves.items() if mesh in key[1:]},
                crossing=case.crossing,
            )
        )
    for _ in ("warm", "timed"):
        for pipe in pipes:
            assert pipe.recv() == "ready"
        start = time.monotonic() + 0.2
        for pipe in pipes:
            pipe.send(start)
        ended = [pipe.recv() for pipe in pipes]
    return Outcome(
        case=case,
        simulated=expected.step_seconds,
        executed=max(stop for stop, _ in ended) - start,
        expected_buffers=tuple(map(round, expected.peak_bytes)),
        buffers=tuple(held for _, held in ended),
    )


def outcomes(
    num_meshes: int, schedules: Sequence[str], forward: float, per_mesh: int | None = None
) -> Iterator[Outcome]:
    """Give what schedules take on as many meshes; a crossing takes a fifth of a forward."""
    per_mesh = per_mesh or (1 if num_meshes > MANY else 2)
    with processes(num_meshes) as pipes:
        for name in schedules:
            alone = name == "sequential"  # its step is as long as all its microbatches' runs
            case = Case(
                schedule=name,
                num_meshes=num_meshes,
                num_microbatches=2 if alone else per_mesh * num_meshes,
                forward=forward,
                crossing=forward / 5,
            )
            yield executed(pipes, case)


def report(found: Iterable[Outcome], console: Console) -> None:
    """Print a table of outcomes."""
    table = Table(title="executed simulation: workers with sleeps for kernels")
    for name in ("meshes", "schedule", "microbatches", "simulated s", "executed s", "ratio"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    table.add_column("most buffers")
    for one in found:
        same = one.buffers == one.expected_buffers
        most = str(max(one.buffers))
        table.add_row(
            str(one.case.num_meshes),
            one.case.schedule,
            str(one.case.num_microbatches),
            f"{one.simulated:.3f}",
            f"{one.executed:.3f}",
            f"{one.ratio:.4f}",
            most if same else f"{one.buffers} for {one.expected_buffers}",
        )
    console.print(table)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--meshes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--forward", type=float, default=FORWARD, help="seconds of a forward")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument(
        "--per-mesh", type=int, help=f"microbatches for each mesh: 2, of more than {MANY} meshes 1"
    )
    given = parser.parse_args()
    for num_meshes in given.meshes:
        found = outcomes(num_meshes, given.schedules, given.forward, given.per_mesh)
        report(found, Console(width=110))


if __name__ == "__main__":
    main()
