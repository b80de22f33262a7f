"""What mesh-runtime adds: host time per instruction, whole steps, schedules on many meshes.

    python benchmarks/mesh_runtime_overhead.py [--no-ray] [--meshes 4 16 64] [--forward 0.2]

Instructions are timed on a two-mesh schedule of empty programs (one device each), so that the time
is that of the interpreter and jax dispatch. So is a call of a tiny step of one device whose state
and batch are 116 arrays, beside `jax.jit`. Whole steps of a four-layer perceptron are compared in
turns: one stage with its program alone and with `jax.jit` under the same shardings; two and four
stages with the sum of their tasks, run one after another; two stages on Ray workers with the same
two in this process. Ratios are of the shortest turn of each, of the medians, and of the processor
time of all processes ("of cores"), which other programs on the machine disturb least. The driver's
processor time of a step on Ray is taken for few and for many microbatches. `executed_schedules.py`
has the schedules on a process for every mesh.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from attrs import evolve, frozen
from executed_schedules import SCHEDULES, outcomes, report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import alpa_meta as alpa
from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import InProcessRuntime
from mesh_runtime.ray_connection import connect

TURNS = 20


def best_seconds(
    action: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the shortest of `repeats` times by `clock`."""
    times = []
    for _ in range(repeats):
        begin = clock()
        action()
        times.append(clock() - begin)
    return min(times)


def instruction_seconds(num_microbatches: int = 64) -> dict[str, float]:
    """Return processor seconds of the issuing thread: per bare call, and per instruction."""
    identity = jax.jit(lambda x: (x,))
    first: list[Instruction] = []
    second: list[Instruction] = []
    for m in range(num_microbatches):
        x, h, y = f"x@{m}", f"h@{m}", f"y@{m}"
        first += [
            Instruction(kind="run", task="a", microbatch=m, inputs=(x,), outputs=(h,)),
            Instruction(kind="send", inputs=(h,), peer=1, microbatch=m),
            Instruction(kind="free", inputs=(x, h)),
        ]
        second += [
            Instruction(kind="receive", outputs=(h,), peer=0, microbatch=m),
            Instruction(kind="run", task="b", microbatch=m, inputs=(h,), outputs=(y,)),
            Instruction(kind="free", inputs=(h, y)),
        ]
    schedule = PipelineSchedule(
        name="empty",
        num_stages=2,
        num_microbatches=num_microbatches,
        programs=(tuple(first), tuple(second)),
    )
    meshes = [Mesh(np.array([device]), ("x",)) for device in jax.devices()[:2]]
    runtime = InProcessRuntime(meshes)
    runtime.load(schedule, {"a": identity, "b": jax.jit(lambda x: (x,))}, [{"x": P()}, {"h": P()}])
    here = NamedSharding(meshes[0], P())
    batch = {
        f"x@{m}": jax.device_put(np.zeros(8, np.float32), here) for m in range(num_microbatches)
    }
    there = NamedSharding(meshes[1], P())

    def calls() -> None:
        for array in batch.values():
            identity(array)

    def copies() -> None:
        for array in batch.values():
            jax.device_put(array, there)

    step = best_seconds(lambda: runtime.step(batch), 20, time.thread_time)
    call = best_seconds(calls, 20, time.thread_time)
    copy = best_seconds(copies, 20, time.thread_time)
    total = len(first) + len(second)
    return {
        "jitted call alone": call / num_microbatches,
        "device_put alone": copy / num_microbatches,
        "per instruction, all in": step / total,
        "per instruction, less calls and copies": max(0.0, step - 2 * call - copy) / total,
    }


def make_weights(key: jax.Array, width: int = 768) -> list[jax.Array]:
    """Return the weights of four layers."""
    return [jax.random.normal(one, (width, width)) / width**0.5 for one in jax.random.split(key, 4)]


def train_step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return the weights after a step of gradient descent, and the loss."""

    def loss_of(weights: list[jax.Array]) -> jax.Array:
        h = x
        for one in weights:
            h = jnp.tanh(h @ one)
        return jnp.mean((h - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], loss


def momentum_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Return the state after a step of gradient descent with two averages, and the loss."""

    def loss_of(weights: list[jax.Array]) -> jax.Array:
        h = x
        for one in weights:
            h = jnp.tanh(h @ one)
        return jnp.mean(h**2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-6), state["weights"], first, second
    )
    steps = state["steps"] + 1
    return {"weights": weights, "first": first, "second": second, "steps": steps}, loss


def small_step_seconds(num_layers: int = 38) -> dict[str, float]:
    """Return processor seconds of the issuing thread for a call of a tiny step on one device."""
    weights = [np.eye(8, dtype=np.float32)] * num_layers
    found = {}
    for where, x in (("device", jnp.ones((4, 8))), ("host", np.ones((4, 8), np.float32))):
        calls: dict[str, Callable[..., Any]] = {
            "jax.jit": jax.jit(momentum_step, donate_argnums=0),
            "parallelize": alpa.parallelize(momentum_step, cluster="host:1"),
        }
        states = {
            name: {
                **{part: list(map(jnp.array, weights)) for part in ("weights", "first", "second")},
                "steps": jnp.int32(0),
            }
            for name in calls
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(10 * TURNS):
            for name, call in calls.items():
                begin = time.thread_time()
                states[name], loss = call(states[name], x)
                seconds[name].append(time.thread_time() - begin)
                loss.block_until_ready()
        for name, times in seconds.items():
            found[f"{name}, {3 * num_layers + 2} arrays, batch on the {where}"] = min(times)
    return found


@frozen(kw_only=True)
class Compared:
    """How long steps take and what they are compared with: seconds by the clock in each turn, and
    processor seconds of all turns in all processes."""

    own: Sequence[float]
    other: Sequence[float]
    own_processor: float
    other_processor: float

    def cells(self) -> list[str]:
        """Return milliseconds of the shortest of each, and three ratios."""
        shortest, median = ((of(self.own), of(self.other)) for of in (min, statistics.median))
        return [
            *(f"{seconds * 1e3:.1f}" for seconds in shortest),
            f"{shortest[0] / shortest[1]:.3f}",
            f"{median[0] / median[1]:.3f}",
            f"{self.own_processor / self.other_processor:.3f}",
        ]


def processor_seconds(process: int) -> float:
    """Return the processor seconds that another process has had so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_turns(
    steps: Sequence[Callable[..., Any]], states: list[Any], x: Any, workers: Sequence[int] = ()
) -> Compared:
    """Return what steps of two programs take, run in turns; `workers` are processes of either."""
    seconds: list[list[float]] = [[], []]
    processor = [0.0, 0.0]

    def so_far() -> float:
        return time.process_time() + sum(map(processor_seconds, workers))

    for turn in range(TURNS + 1):
        for k, step in enumerate(steps):
            begin, before = time.perf_counter(), so_far()
            states[k], loss = step(states[k], x)
            float(loss)
            jax.block_until_ready(states[k])  # else its last runs fall into the other's turn
            if turn:  # the first compiles
                seconds[k].append(time.perf_counter() - begin)
                processor[k] += so_far() - before
    return Compared(
        own=seconds[0], other=seconds[1], own_processor=processor[0], other_processor=processor[1]
    )


def pipelines(num_stages: int, x: Any) -> Compared:
    """Return what a step in stages takes, and the sum of its tasks' runs one after another (its
    processor time is that of the whole step)."""
    step = alpa.parallelize(
        train_step,
        cluster=f"host:{num_stages}",
        num_stages=num_stages,
        num_microbatches=2 * num_stages,
        schedule="1f1b",
    )
    state, sums = step.init(make_weights, jax.random.key(0), batch=x), []

    def run(mode: str, _: Any, x: Any) -> Any:
        nonlocal state
        step.executable.trace(mode)
        state, loss = step(state, x)
        float(loss)
        if mode == "blocking":
            runs = [event for event in step.last_trace if event.instruction.kind == "run"]
            sums.append(sum(event.stop - event.start for event in runs))
        return state, loss

    modes = [functools.partial(run, mode) for mode in ("none", "blocking")]
    return evolve(in_turns(modes, [None, None], x), other=sums[1:])


def one_stage(x: Any, by: str) -> Compared:
    """Return what a step of one stage takes, and by "jit" `jax.jit` with the same shardings, which
    may choose another program, or by "program" the plan's program alone."""
    key = jax.random.key(0)
    one = alpa.parallelize(train_step, cluster="host:2", num_stages=1, num_microbatches=1)
    state = one.init(make_weights, key, batch=x)
    kept = [leaf.sharding for leaf in state]
    along = one.executable.input_sharding("x")
    x = jax.device_put(x, along)
    other: Callable[..., Any] = jax.jit(
        train_step, in_shardings=(kept, along), out_shardings=(kept, None), donate_argnums=0
    )
    if by == "program":
        (task,) = one.executable.tasks.values()
        planned = one.executable.planned
        paths = [leaf.path for leaf in planned.program.inputs]
        reads = [paths.index(name) for name in task.task.spec.inputs]
        made = [task.task.spec.outputs.index(one.name) for one in planned.tasks.outputs]

        def alone(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            given = [*weights, x]
            results = task.function(*(given[k] for k in reads))
            *after, loss = (results[k] for k in made)
            return after, loss

        other = alone

    plain = jax.device_put(make_weights(key), kept)
    return in_turns([one, other], [state, plain], x)


def on_ray(x: Any, times: int = 1) -> Compared:
    """Return what a step of two stages takes on Ray, and in this process, on `times` the rows."""
    key, x = jax.random.key(0), np.concatenate([x] * times)
    near = alpa.parallelize(
        train_step, cluster="host:2", num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    state = near.init(make_weights, key, batch=x)
    far = alpa.parallelize(train_step, plan=near.plan, runtime="ray")
    try:
        states = [far.init(make_weights, key, batch=x), state]
        assert far._pool is not None
        (workers,) = far._pool._workers.values()
        return in_turns([far, near], states, x, [*workers.process_ids.values()])
    finally:
        far.close()


def driver_seconds(x: Any, counts: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return the least processor seconds of the driver for a step on Ray, by the number of its
    instructions: of the thread that makes steps, and of all, of which Ray's run as long as a
    step."""
    found = {}
    for count in counts:
        far = alpa.parallelize(
            train_step,
            cluster="host:2",
            num_stages=2,
            num_microbatches=count,
            schedule="1f1b",
            runtime="ray",
        )
        try:
            state = far.init(make_weights, jax.random.key(0), batch=x)
            own, all_threads = [], []
            for _ in range(TURNS):
                begin = time.thread_time(), time.process_time()
                state, loss = far(state, x)
                float(loss)
                own.append(time.thread_time() - begin[0])
                all_threads.append(time.process_time() - begin[1])
            found[sum(map(len, far.schedule.programs))] = min(own), min(all_threads)
        finally:
            far.close()
    return found


@contextmanager
def local_cluster() -> Iterator[None]:
    """Have one Ray cluster of this machine for all that runs on Ray."""
    import ray

    connect(ray, "local", 2, 300.0)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--meshes", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--forward", type=float, default=0.2, help="seconds of a forward")
    given = parser.parse_args()
    console = Console(width=110)
    table = Table(title="processor time of the issuing thread")
    table.add_column("what")
    table.add_column("microseconds", justify="right")
    for name, seconds in {**instruction_seconds(), **small_step_seconds()}.items():
        table.add_row(name, f"{seconds * 1e6:.1f}")
    console.print(table)
    x = np.asarray(jax.random.normal(jax.random.key(1), (1024, 768)))
    steps: dict[str, tuple[Callable[..., Compared], float]] = {
        "one stage / its program alone": (functools.partial(one_stage, by="program"), 1.03),
        "one stage / jax.jit": (functools.partial(one_stage, by="jit"), 1.03),
        "two stages / sum of tasks": (functools.partial(pipelines, 2), 1.15),
        "four stages / sum of tasks": (functools.partial(pipelines, 4), 1.15),
    }
    if not given.no_ray:
        steps["two stages on Ray / in process"] = (on_ray, 1.10)
        steps["the same, three times the rows"] = (functools.partial(on_ray, times=3), 1.10)
    table = Table(title=f"whole steps, {TURNS} in turns")
    for name in ("what", "shortest ms", "compared with", "ratio", "of medians", "of cores", "aim"):
        table.add_column(name, justify="left" if name == "what" else "right")
    cluster = nullcontext() if given.no_ray else local_cluster()
    with cluster:
        for what, (measure, aim) in steps.items():
            table.add_row(what, *measure(x).cells(), f"{aim:.2f}")
        console.print(table)
        if not given.no_ray:
            table = Table(title="processor time of the driver for a step on Ray")
            table.add_column("instructions", justify="right")
            table.add_column("its thread, ms", justify="right")
            table.add_column("with Ray's threads, ms", justify="right")
            for count, both in driver_seconds(x, (4, 64)).items():
                table.add_row(str(count), *(f"{one * 1e3:.2f}" for one in both))
            console.print(table)
    for num_meshes in given.meshes:
        report(outcomes(num_meshes, SCHEDULES, given.forward), console)


if __name__ == "__main__":
    main()
