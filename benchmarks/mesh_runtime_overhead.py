"""What mesh-runtime adds: host time per instruction, whole steps.

    python benchmarks/mesh_runtime_overhead.py

Instructions are timed on a two-mesh schedule of empty programs (one device each), so that the time
is that of the interpreter and jax dispatch. Whole steps of a four-layer perceptron are compared in
turns, by the shortest of each: one stage with `jax.jit` under the same shardings, two stages on Ray
workers with the same two in this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import alpa_meta as alpa
from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import InProcessRuntime


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
    for _ in range(20):
        for k, step in enumerate(steps):
            begin = time.perf_counter()
            states[k], loss = step(states[k], x)
            float(loss)
            shortest[k] = min(shortest[k], time.perf_counter() - begin)
    return shortest


def whole_steps() -> dict[str, tuple[float, float]]:
    """Return the seconds of a step and of what it is compared with, by what they are."""
    key, x = jax.random.key(0), np.asarray(jax.random.normal(jax.random.key(1), (1024, 768)))
    one = alpa.parallelize(train_step, cluster="host:2", num_stages=1, num_microbatches=1)
    state = one.init(make_weights, key, batch=x)
    kept = [leaf.sharding for leaf in state]
    along = one.executable.input_sharding("x")
    jitted = jax.jit(
        train_step, in_shardings=(kept, along), out_shardings=(kept, None), donate_argnums=0
    )
    plain = jax.device_put(make_weights(key), kept)
    single = shortest_steps([one, jitted], [state, plain], jax.device_put(x, along))

    near = alpa.parallelize(
        train_step, cluster="host:2", num_stages=2, num_microbatches=4, schedule="1f1b"
    )
    state = near.init(make_weights, key, batch=x)
    far = alpa.parallelize(train_step, plan=near.plan, runtime="ray")
    try:
        states = [far.init(make_weights, key, batch=x), state]
        double = shortest_steps([far, near], states, x)
    finally:
        far.close()
    return {
        "one stage / jax.jit": (single[0], single[1]),
        "two stages on Ray / in process": (double[0], double[1]),
    }


def main() -> None:
    """Print the tables."""
    table = Table(title="processor time of the issuing thread")
    table.add_column("what")
    table.add_column("microseconds", justify="right")
    for name, seconds in instruction_seconds().items():
        table.add_row(name, f"{seconds * 1e6:.1f}")
    Console().print(table)
    table = Table(title="whole steps")
    for name in ("what", "milliseconds", "compared with", "ratio"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for what, (own, other) in whole_steps().items():
        table.add_row(what, f"{own * 1e3:.1f}", f"{other * 1e3:.1f}", f"{own / other:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
