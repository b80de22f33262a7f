"""What mesh-runtime adds: host time per instruction, whole steps, schedules on many meshes.

    python benchmarks/mesh_runtime_overhead.py [--no-ray] [--meshes 4 16] [--forward 0.2]

Instructions are timed on a two-mesh schedule of empty programs (one device each), so that the time
is that of the interpreter and jax dispatch. Whole steps of a four-layer perceptron are compared in
turns, by the shortest of each: one stage with its program alone and with `jax.jit` under the same
shardings; two and four
stages with the sum of their tasks, run one after another; two stages on Ray workers with the same
two in this process. The driver's processor time of a step on Ray is taken for few and for many
microbatches. `executed_schedules.py` has the schedules on a process for every mesh.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from executed_schedules import SCHEDULES, outcomes, report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import alpa_meta as alpa
from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import InProcessRuntime

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


def shortest_steps(steps: list[Callable[..., Any]], states: list[Any], x: Any) -> list[float]:
    """Return the shortest seconds of a step of each program, run in turns."""
    shortest = [float("inf")] * len(steps)
    for _ in range(TURNS):
        for k, step in enumerate(steps):
            begin = time.perf_counter()
            states[k], loss = step(states[k], x)
            float(loss)
            shortest[k] = min(shortest[k], time.perf_counter() - begin)
    return shortest


def pipelines(num_stages: int, x: Any) -> tuple[float, float]:
    """Return the shortest seconds of a step in stages, and of the sum of its tasks' runs one after
    another."""
    step = alpa.parallelize(
        train_step,
        cluster=f"host:{num_stages}",
        num_stages=num_stages,
        num_microbatches=2 * num_stages,
        schedule="1f1b",
    )
    state = step.init(make_weights, jax.random.key(0), batch=x)
    shortest = [float("inf")] * 2
    for turn in range(TURNS):
        for k, mode in enumerate(("none", "blocking")):
            step.executable.trace(mode)
            begin = time.perf_counter()
            state, loss = step(state, x)
            float(loss)
            seconds = time.perf_counter() - begin
            runs = [event for event in step.last_trace if event.instruction.kind == "run"]
            if mode == "blocking":
                seconds = sum(event.stop - event.start for event in runs)
            if turn:
                shortest[k] = min(shortest[k], seconds)
    return shortest[0], shortest[1]


def one_stage(x: Any, by: str) -> tuple[float, float]:
    """Return the shortest seconds of a step of one stage, and by "jit" of `jax.jit` with the same
    shardings, which may choose another program, or by "program" of the plan's program alone."""
    key = jax.random.key(0)
    one = alpa.parallelize(train_step, cluster="host:2", num_stages=1, num_microbatches=1)
    state = one.init(make_weights, key, batch=x)
    kept = [leaf.sharding for leaf in state]
    along = one.executable.input_sharding("x")
    x = jax.device_put(x, along)
    other = jax.jit(
        train_step, in_shardings=(kept, along), out_shardings=(kept, None), donate_argnums=0
    )
    if by == "program":
        (task,) = one.executable.tasks.values()
        planned = one.executable.planned
        paths = [leaf.path for leaf in planned.program.inputs]
        reads = [paths.index(name) for name in task.task.spec.inputs]
        made = [task.task.spec.outputs.index(one.name) for one in planned.tasks.outputs]

        def other(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            given = [*weights, x]
            results = task.function(*(given[k] for k in reads))
            *after, loss = (results[k] for k in made)
            return after, loss

    plain = jax.device_put(make_weights(key), kept)
    own, alone = shortest_steps([one, other], [state, plain], x)
    return own, alone


def on_ray(x: Any) -> tuple[float, float]:
    """Return the shortest seconds of a step of two stages on Ray, and in this process."""
    key = jax.random.key(0)
    near = alpa.parallelize(
        train_step, cluster="host:2", num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    state = near.init(make_weights, key, batch=x)
    far = alpa.parallelize(train_step, plan=near.plan, runtime="ray")
    try:
        states = [far.init(make_weights, key, batch=x), state]
        own, other = shortest_steps([far, near], states, x)
    finally:
        far.close()
    return own, other


def driver_seconds(x: Any, counts: Sequence[int]) -> dict[int, float]:
    """Return the least processor seconds of the driver's threads for a step on Ray, by the number
    of its instructions."""
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
            times = []
            for _ in range(TURNS):
                begin = time.process_time()
                state, loss = far(state, x)
                float(loss)
                times.append(time.process_time() - begin)
            found[sum(map(len, far.schedule.programs))] = min(times)
        finally:
            far.close()
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--meshes", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--forward", type=float, default=0.2, help="seconds of a forward")
    given = parser.parse_args()
    console = Console(width=110)
    table = Table(title="processor time of the issuing thread")
    table.add_column("what")
    table.add_column("microseconds", justify="right")
    for name, seconds in instruction_seconds().items():
        table.add_row(name, f"{seconds * 1e6:.1f}")
    console.print(table)
    x = np.asarray(jax.random.normal(jax.random.key(1), (1024, 768)))
    steps = {
        "one stage / its program alone": (functools.partial(one_stage, by="program"), 1.03),
        "one stage / jax.jit": (functools.partial(one_stage, by="jit"), 1.03),
        "two stages / sum of tasks": (functools.partial(pipelines, 2), 1.15),
        "four stages / sum of tasks": (functools.partial(pipelines, 4), 1.15),
    }
    if not given.no_ray:
        steps["two stages on Ray / in process"] = (on_ray, 1.10)
    table = Table(title="whole steps")
    for name in ("what", "milliseconds", "compared with", "ratio", "aim"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for what, (measure, aim) in steps.items():
        own, other = measure(x)
        figures = (f"{own * 1e3:.1f}", f"{other * 1e3:.1f}", f"{own / other:.3f}", f"{aim:.2f}")
        table.add_row(what, *figures)
    console.print(table)
    if not given.no_ray:
        table = Table(title="processor time of the driver for a step on Ray")
        table.add_column("instructions", justify="right")
        table.add_column("milliseconds", justify="right")
        for count, seconds in driver_seconds(x, (4, 64)).items():
            table.add_row(str(count), f"{seconds * 1e3:.1f}")
        console.print(table)
    for num_meshes in given.meshes:
        report(outcomes(num_meshes, SCHEDULES, given.forward), console)


if __name__ == "__main__":
    main()
