"""Transfers between processes: how fast they are, and what overlapping them with work is worth.

    python benchmarks/transfers.py [--sizes 64 1024] [--no-ray] [--only bandwidth|overlap]

Bandwidth: the median of several transfers of one array from another process, in turns with a
memcpy of as many bytes and with Ray (an actor's `ray.put`, a `ray.get` and a copy out of Ray's
memory), and the median of the ratios turn by turn, which other load on the machine changes less.

Overlap: the two-stage settings of arXiv 2211.05322 (Alpa's suites: GPT 2.6B and U-Transformer 2B on
two p3.8xlarge), broadcast with eager-1F1B against send/recv with blocking 1F1B, simulated and
executed. Executed are the schedules and the transfers, by two processes whose link is slowed down
to what the plan takes; a stage's work is a wait of its length, so that two processes on few cores
do not disturb each other. All times are shortened by one factor. The U-Transformer is taken to be
the U-Net of diffusers that Alpa's benchmark uses, with its last two levels of up-blocks on the
second stage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table

from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask
from alpa_interchange.schedule import Instruction, PipelineSchedule
from alpa_interchange.tensor import ShardingSpec, TensorType
from cost_model import simulate
from resharding import HostTransport, Network, new_token, plan
from resharding.regions import Region, Runs
from resharding.socket_link import SocketLink
from stage_dp import order

OWNERS = {0: "a", 1: "b"}
MIB = 1 << 20


def move(num_bytes: int, sender: int = 0, receiver: int = 1) -> ReshardingPlan:
    """Return the plan to move bytes from one process, with one device, to another."""
    source, target = (
        PlacedTensor(
            spec=ShardingSpec(((),)),
            axis_names=("x",),
            mesh_shape=(1,),
            devices=(device,),
            hosts=(device,),
        )
        for device in (sender, receiver)
    )
    tensor = TensorType((num_bytes,), "uint8")
    return plan(ReshardingTask(tensor=tensor, source=source, target=target), Network())


# ---------------------------------------------------------------------- bandwidth


class StreamLink(SocketLink):
    """A link that keeps its hands off the memory of others."""

    def reads(self, peer: str) -> bool:
        return False

    def shares(self, peer: str) -> bool:
        return False


def end(name: str, token: bytes, way: str) -> HostTransport:
    """Return an end that fetches by one way."""
    link = None if way == "memory" else StreamLink(name, token)
    return HostTransport(name, token, link=link, window=4 << 30)


def send_forever(pipe: Connection, token: bytes, way: str, num_bytes: int) -> None:
    """Send an array whenever told to."""
    transport = end("a", token, way)
    pipe.send(transport.address)
    transport.connect({"b": pipe.recv()}, OWNERS)
    array, made, count = np.ones(num_bytes, np.uint8), move(num_bytes), 0
    while pipe.recv():
        transport.send(str(count), made, lambda: {0: array}).result(60)
        count += 1
    transport.close()


def transfers_of(way: str, num_bytes: int) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return what transfers an array once and says how long that took, and what ends it all."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    token = new_token()
    process = context.Process(target=send_forever, args=(theirs, token, way, num_bytes))
    process.start()
    transport = end("b", token, way)
    address = ours.recv()
    if way == "TCP":
        address = evolve(address, machine="elsewhere")
    transport.connect({"a": address}, OWNERS)
    ours.send(transport.address)
    made, count = move(num_bytes), iter(range(10**9))

    def once() -> float:
        receiving = transport.receive(str(next(count)), made)
        begin = time.perf_counter()
        ours.send(True)
        receiving.result(120)
        return time.perf_counter() - begin

    def stop() -> None:
        ours.send(False)
        process.join()
        transport.close()

    return once, stop


def ray_transfers(num_bytes: int) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return what gets an array out of an actor's put."""
    import ray

    @ray.remote
    class Holder:
        def __init__(self) -> None:
            self.array = np.ones(num_bytes, np.uint8)

        def put(self) -> list[Any]:
            return [ray.put(self.array)]

    holder: Any = Holder.remote()  # type: ignore[attr-defined]
    target = np.ones(num_bytes, np.uint8)

    def once() -> float:
        begin = time.perf_counter()
        (reference,) = ray.get(holder.put.remote())
        np.copyto(target, ray.get(reference))
        return time.perf_counter() - begin

    return once, lambda: ray.kill(holder)


def memcpy_of(num_bytes: int) -> Callable[[], float]:
    """Return what copies an array once."""
    source, target = (np.ones(num_bytes, np.uint8) for _ in range(2))

    def once() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    return once


def report_bandwidth(sizes: Sequence[int], with_ray: bool) -> None:
    """Print bytes/s of every way, measured in turns."""
    if with_ray:
        import ray

        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=6 << 30,
        )
    table = Table(title="GB/s from another process")
    ways = ["memory", "unix socket", "TCP", *(["Ray put + get"] if with_ray else [])]
    for name in (
        "MiB",
        "memcpy",
        *ways,
        "memory / memcpy",
        *(["memory / Ray"] if with_ray else []),
    ):
        table.add_column(name, justify="right")
    for size in sizes:
        num_bytes = size * MIB
        made = {way: transfers_of(way, num_bytes) for way in ways[:3]}
        if with_ray:
            made["Ray put + get"] = ray_transfers(num_bytes)
        copy = memcpy_of(num_bytes)
        took: dict[str, list[float]] = {way: [] for way in ("memcpy", *ways)}
        for turn in range(10 if size < 512 else 6):
            for way, once in (("memcpy", copy), *((way, each[0]) for way, each in made.items())):
                seconds = once()
                if turn:  # in the first, memory is touched for the first time
                    took[way].append(seconds)
        for _, stop in made.values():
            stop()
        row = [f"{num_bytes / statistics.median(took[way]) / 1e9:.2f}" for way in took]
        for other in ("memcpy", "Ray put + get") if with_ray else ("memcpy",):
            pairs = zip(took[other], took["memory"], strict=True)
            row.append(f"{statistics.median(theirs / ours for theirs, ours in pairs):.2f}")
        table.add_row(str(size), *row)
    Console().print(table)


# ---------------------------------------------------------------------- overlap


@frozen(kw_only=True)
class Setting:
    """Two stages on a host each: seconds of a run, and what crosses, by strategy."""

    name: str
    num_microbatches: int
    forward: tuple[float, float]  # seconds, by stage
    backward: tuple[float, float]
    crossing: Mapping[str, float]  # seconds one way, by strategy
    paper: float  # end-to-end gain


def crossing_seconds(shapes: Sequence[tuple[int, ...]], dtype: str, spec: str) -> dict[str, float]:
    """Return the seconds to move tensors between two p3.8xlarge of 4 devices, by strategy."""
    axes = {"data": (("data",),), "all": (("data", "model"),)}[spec]
    found = {"send_recv": 0.0, "broadcast": 0.0}
    for shape in shapes:
        dims = ShardingSpec((*axes, *[()] * (len(shape) - 1)))
        source, target = (
            PlacedTensor(
                spec=dims,
                axis_names=("data", "model"),
                mesh_shape=(2, 2),
                devices=tuple(range(4 * host, 4 * host + 4)),
                hosts=(host,) * 4,
            )
            for host in range(2)
        )
        task = ReshardingTask(tensor=TensorType(shape, dtype), source=source, target=target)
        for strategy in found:
            found[strategy] += plan(task, Network(), strategy).seconds
    return found


def gpt() -> Setting:
    """Return GPT 2.6B: 32 layers of 2,560, sequences of 1,024, float16, batch 32 in 4 microbatches,
    data 2 x model 2 in each stage; a V100 does 50 Tflop/s, layers are computed again."""
    tokens, width = 8 * 1024, 2560
    forward = 2 * 2.6e9 / 2 * tokens / (4 * 50e12)
    return Setting(
        name="GPT 2.6B",
        num_microbatches=4,
        forward=(forward, forward),
        backward=(3 * forward, 3 * forward),
        crossing=crossing_seconds([(8, 1024, width)], "float16", "data"),
        paper=1.1,
    )


def u_transformer() -> Setting:
    """Return the U-Net of 672 x (1, 2, 4, 4) channels, two blocks a level, on 32 x 32 images in
    float32, batch 2,048 in 32 microbatches; a V100 does 6.5 Tflop/s, layers are computed again."""
    batch, channels = 64, [672, 1344, 2688, 2688]

    def block(level: int, inputs: int) -> float:
        """flop of two 3 x 3 convolutions on a microbatch."""
        pixels, outputs = (32 >> level) ** 2, channels[level]
        return 2 * 9 * (inputs + outputs) * outputs * pixels * batch

    skips = [(batch, 32, 32, 672)]  # what the down-blocks keep for the up-blocks, from the first
    down, inputs = 0.0, 672
    for level in range(4):
        side = 32 >> level
        for _ in range(2):
            down += block(level, inputs)
            inputs = channels[level]
            skips.append((batch, side, side, inputs))
        if level < 3:
            skips.append((batch, side // 2, side // 2, inputs))
    middle = 2 * block(3, inputs)
    kept, up = list(skips), {}
    for level in (3, 2, 1, 0):
        up[level] = 0.0
        for _ in range(3):
            up[level] += block(level, inputs + kept.pop()[-1])
            inputs = channels[level]
    first = down + middle + up[3] + up[2]
    second = up[1] + up[0]
    crossing = [*skips[:6], (batch, 16, 16, channels[2])]  # of the two last levels, and the value
    rate = 4 * 6.5e12
    return Setting(
        name="U-Transformer 2B",
        num_microbatches=32,
        forward=(first / rate, second / rate),
        backward=(3 * first / rate, 3 * second / rate),
        crossing=crossing_seconds(crossing, "float32", "data"),
        paper=1.5,
    )


def instructions(name: str, num_microbatches: int) -> PipelineSchedule:
    """Return a schedule of two stages as instruction lists, receives right before their use."""
    programs: list[tuple[Instruction, ...]] = []
    for stage, steps in enumerate(order(name, 2, num_microbatches).steps):
        made: list[Instruction] = []
        for step in steps:
            m, value = step.microbatch, "h" if step.phase == "forward" else "d"
            enters = stage == (1 if step.phase == "forward" else 0)
            buffer = f"{value}@{m}"
            if enters:
                made.append(
                    Instruction(kind="receive", outputs=(buffer,), peer=1 - stage, microbatch=m)
                )
            made.append(
                Instruction(
                    kind="run",
                    task=f"{step.phase}{stage}",
                    phase=step.phase,
                    stage=stage,
                    microbatch=m,
                    inputs=(buffer,) if enters else (f"x{value}@{m}",),
                    outputs=(f"o{value}@{m}",) if enters else (buffer,),
                )
            )
            if not enters:
                made.append(
                    Instruction(kind="send", inputs=(buffer,), peer=1 - stage, microbatch=m)
                )
        programs.append(tuple(made))
    return PipelineSchedule(
        name=name, num_stages=2, num_microbatches=num_microbatches, programs=tuple(programs)
    )


class SlowLink(SocketLink):
    """A link that fetches no faster than `rate` bytes/s, one box at a time."""

    most_inline = 0
    rate = 1e9

    def lanes(self, peer: str) -> int:
        return 1

    def shares(self, peer: str) -> bool:
        return False

    def read(
        self, peer: str, address: int, runs: Runs, region: Region, begin: int, end: int
    ) -> None:
        start = time.perf_counter()
        super().read(peer, address, runs, region, begin, end)
        time.sleep(max(0.0, start + (end - begin) / self.rate - time.perf_counter()))


def execute(
    pipe: Connection,
    stage: int,
    token: bytes,
    schedule: PipelineSchedule,
    seconds: Mapping[str, float],
    crossing: float,
    blocking: bool,
) -> None:
    """Run one stage of a schedule; answer when it began and ended, and how long it waited."""
    name, num_bytes = OWNERS[stage], 4 * MIB
    link = SlowLink(name, token)
    link.rate = num_bytes / crossing
    transport = HostTransport(name, token, link=link)
    pipe.send(transport.address)
    transport.connect({OWNERS[1 - stage]: pipe.recv()}, OWNERS)
    out, into = move(num_bytes, stage, 1 - stage), move(num_bytes, 1 - stage, stage)
    tile = np.ones(num_bytes, "u1")
    program = schedule.programs[stage]
    transport.send("warm", out, lambda: {stage: tile})
    transport.receive("warm", into).result(60)
    receivings = {
        each.outputs[0]: transport.receive(each.outputs[0], into)
        for each in program
        if each.kind == "receive"
    }
    pipe.send("ready")
    pipe.recv()
    begin, waited, sendings = time.perf_counter(), 0.0, []
    for each in program:
        start = time.perf_counter()
        if each.kind == "run":
            time.sleep(seconds[each.task])
            continue
        if each.kind == "send":
            sendings.append(transport.send(each.inputs[0], out, lambda: {stage: tile}))
            if blocking:
                sendings[-1].result(60)
        else:
            receivings[each.outputs[0]].result(60)
        waited += time.perf_counter() - start
    end_ = time.perf_counter()
    for sending in sendings:
        sending.result(60)
    pipe.send((end_ - begin, waited))
    pipe.recv()
    transport.close()


def two_stages(
    target: Callable[..., None], *arguments: Any
) -> tuple[list[Connection], list[BaseProcess]]:
    """Return pipes to two processes that run `target(pipe, stage, token, *arguments)` and know each
    other's addresses, and the processes."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    token = new_token()
    for stage in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, stage, token, *arguments))
        process.start()
        processes.append(process)
        pipes.append(ours)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe, address in zip(pipes, reversed(addresses), strict=True):
        pipe.send(address)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    return pipes, processes


def executed(
    schedule: PipelineSchedule, seconds: Mapping[str, float], crossing: float, blocking: bool
) -> tuple[float, list[float]]:
    """Return the seconds of a step on two processes, and what each stage waited for the other."""
    pipes, processes = two_stages(execute, schedule, seconds, crossing, blocking)
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    return max(took for took, _ in found), [waited for _, waited in found]


CASES = (
    ("send_recv", "1f1b", True),
    ("broadcast", "1f1b", True),
    ("broadcast", "1f1b", False),
    ("broadcast", "eager-1f1b", False),
)
"""(strategy, schedule, whether a stage does nothing else while it sends)"""


def report_overlap(step_seconds: float) -> None:
    """Print simulated and executed steps of the paper's settings."""
    for setting in (gpt(), u_transformer()):
        table = Table(title=f"{setting.name}: seconds of a step; paper: {setting.paper} x")
        for name in ("strategy", "schedule", "blocking", "simulated", "exposed", "executed"):
            table.add_column(name, justify="left" if name in ("strategy", "schedule") else "right")
        for name in ("waited", "gain simulated", "gain executed"):
            table.add_column(name, justify="right")
        tasks = {f"forward{k}": setting.forward[k] for k in range(2)}
        tasks |= {f"backward{k}": setting.backward[k] for k in range(2)}
        first: tuple[float, float] | None = None
        shorter = 0.0
        for strategy, name, blocking in CASES:
            schedule = instructions(name, setting.num_microbatches)
            crossing = setting.crossing[strategy]
            expected = simulate(schedule, tasks, {"h": crossing, "d": crossing}, blocking=blocking)
            shorter = shorter or min(1.0, step_seconds / expected.step_seconds)
            short = {task: seconds * shorter for task, seconds in tasks.items()}
            took, waited = executed(schedule, short, crossing * shorter, blocking)
            first = first or (expected.step_seconds, took)
            table.add_row(
                strategy,
                name,
                "yes" if blocking else "no",
                f"{expected.step_seconds:.2f}",
                f"{sum(expected.exposed_seconds) / 2:.2f}",
                f"{took / shorter:.2f}",
                f"{sum(waited) / 2 / shorter:.2f}",
                f"{first[0] / expected.step_seconds:.2f}",
                f"{first[1] / took:.2f}",
            )
        Console(width=130).print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1024], help="MiB")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--only", choices=("bandwidth", "overlap"))
    parser.add_argument("--step", type=float, default=6.0, help="seconds of an executed step")
    given = parser.parse_args()
    if given.only != "overlap":
        report_bandwidth(given.sizes, not given.no_ray)
    if given.only != "bandwidth":
        report_overlap(given.step)


if __name__ == "__main__":
    main()
