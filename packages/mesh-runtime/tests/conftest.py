"""Eight host devices for every test, and a small pipelined regression to run on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.setdefault("RAY_worker_niceness", "0")  # not behind other tests
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # other programs' memory is not ours
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle workers, which none uses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve, frozen
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime import Executable, ExportedProgram


@frozen(kw_only=True)
class Pipeline:
    """A chain of `tanh(h @ w_i)` stages with squared loss and gradient descent, as a schedule."""

    schedule: PipelineSchedule
    functions: dict[str, Callable[..., Any]]  # task -> plain function
    donated: dict[str, tuple[str, ...]]
    specs: tuple[dict[str, P], ...]  # per mesh
    outputs: tuple[str, ...]
    carry: dict[str, str]
    num_stages: int
    num_microbatches: int
    width: int = 8
    rate: float = 0.1

    def state(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        return {
            f"w{stage}": random.normal(size=(self.width, self.width)).astype(np.float32) / 3
            for stage in range(self.num_stages)
        }

    def batch(self, seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(100 + seed)
        made = {}
        for m in range(self.num_microbatches):
            made[f"x@{m}"] = random.normal(size=(4, self.width)).astype(np.float32)
            made[f"y@{m}"] = random.normal(size=(4, self.width)).astype(np.float32)
        return made

    def whole(self, seed: int) -> dict[str, np.ndarray]:
        """Return the same batch with the rows of all microbatches in one array."""
        parts = self.batch(seed)
        return {
            name: np.concatenate([parts[f"{name}@{m}"] for m in range(self.num_microbatches)])
            for name in ("x", "y")
        }

    def reference(self, num_steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
        """Return the losses and final weights of the same training on one device."""

        def loss(weights, x, y):
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return jnp.sum((x - y) ** 2)

        weights = [self.state()[f"w{stage}"] for stage in range(self.num_stages)]
        losses = []
        for step in range(num_steps):
            batch = self.batch(step)
            total, gradients = 0.0, [0.0] * self.num_stages
            for m in range(self.num_microbatches):
                value, grads = jax.value_and_grad(loss)(weights, batch[f"x@{m}"], batch[f"y@{m}"])
                total += float(value)
                gradients = [a + b for a, b in zip(gradients, grads, strict=True)]
            weights = [w - self.rate * g for w, g in zip(weights, gradients, strict=True)]
            losses.append(total)
        return losses, {f"w{i}": np.asarray(w) for i, w in enumerate(weights)}

    def jitted(self) -> dict[str, Executable]:
        made: dict[str, Executable] = {}
        for task, function in self.functions.items():
            names = self.inputs_of(task)
            positions = tuple(i for i, n in enumerate(names) if n in self.donated.get(task, ()))
            made[task] = jax.jit(function, donate_argnums=positions)
        return made

    def keeping(self, value: str) -> PipelineSchedule:
        """Return the schedule without the instructions that free a value of the microbatches."""

        def kept(instruction: Instruction) -> Instruction:
            names = [name for name in instruction.inputs if not name.startswith(f"{value}@")]
            return evolve(instruction, inputs=tuple(names))

        programs = [
            [kept(one) if one.kind == "free" else one for one in program]
            for program in self.schedule.programs
        ]
        left = tuple(tuple(one for one in p if one.kind != "free" or one.inputs) for p in programs)
        return evolve(self.schedule, programs=left)

    def exported(self, meshes) -> dict[str, ExportedProgram]:
        """Return every task as a serialised program for meshes shaped like `meshes`."""
        if find_spec("flatbuffers") is None:
            pytest.skip("serialising programs needs the extra mesh-runtime[export]")
        import jax.export

        shapes = {"x": (4, self.width), "y": (4, self.width), "h": (4, self.width)}
        made = {}
        for mesh_index, program in enumerate(self.schedule.programs):
            for instruction in program:
                if instruction.kind != "run" or instruction.task in made:
                    continue
                task, mesh = instruction.task, meshes[mesh_index]
                arguments = []
                for name in self.inputs_of(task):
                    kind = name[0]
                    shape = () if kind == "l" else shapes.get(kind, (self.width, self.width))
                    if kind == "d":
                        shape = (4, self.width)
                    sharding = NamedSharding(mesh, self.specs[mesh_index].get(name, P()))
                    arguments.append(jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding))
                exported = jax.export.export(jax.jit(self.functions[task]))(*arguments)
                made[task] = ExportedProgram(
                    program=bytes(exported.serialize()), donated=self.donated.get(task, ())
                )
        return made

    def inputs_of(self, task: str) -> tuple[str, ...]:
        for program in self.schedule.programs:
            for instruction in program:
                if instruction.task == task:
                    return tuple(name.split("@")[0] for name in instruction.inputs)
        raise KeyError(task)


def make_pipeline(num_stages: int = 2, num_microbatches: int = 4) -> Pipeline:
    """Return the pipeline with a 1F1B order, one stage per mesh."""
    rate, last = Pipeline.__attrs_attrs__.rate.default, num_stages - 1
    functions: dict[str, Callable[..., Any]] = {}
    donated: dict[str, tuple[str, ...]] = {}
    specs, programs = [], []
    for stage in range(num_stages):
        source = "x" if stage == 0 else f"h{stage}"
        functions[f"start{stage}"] = lambda w: (w * 0, jnp.zeros(()))
        functions[f"update{stage}"] = lambda w, g: (w - rate * g,)
        donated[f"update{stage}"] = (f"w{stage}",)
        if stage < last:
            functions[f"forward{stage}"] = lambda h, w: (jnp.tanh(h @ w),)

            def middle(h, w, d, g):
                _, pull = jax.vjp(lambda h, w: jnp.tanh(h @ w), h, w)
                dh, dw = pull(d)
                return dh, g + dw

            functions[f"backward{stage}"] = middle
        else:

            def end(h, w, y, g, total):
                def loss(h, w):
                    return jnp.sum((jnp.tanh(h @ w) - y) ** 2)

                value, (dh, dw) = jax.value_and_grad(loss, argnums=(0, 1))(h, w)
                return dh, g + dw, total + value

            functions[f"backward{stage}"] = end
        donated[f"backward{stage}"] = (f"g{stage}",)
        specs.append(
            {
                f"w{stage}": P(None, "model"),
                source: P("data"),
                "y": P("data"),
                f"d{stage}": P("data"),
            }
        )
        programs.append(_program(stage, num_stages, num_microbatches, source))
    return Pipeline(
        schedule=PipelineSchedule(
            name="1f1b",
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            programs=tuple(programs),
        ),
        functions=functions,
        donated=donated,
        specs=tuple(specs),
        outputs=(f"loss{last}",),
        carry={f"new_w{stage}": f"w{stage}" for stage in range(num_stages)},
        num_stages=num_stages,
        num_microbatches=num_microbatches,
    )


def _program(stage: int, num_stages: int, count: int, source: str) -> tuple[Instruction, ...]:
    last = stage == num_stages - 1
    weight, total, loss = f"w{stage}", f"g{stage}", f"loss{stage}"
    made = [
        Instruction(
            kind="run", task=f"start{stage}", phase="start", inputs=(weight,), outputs=(total, loss)
        )
    ]

    def forward(m: int) -> None:
        if stage > 0:
            made.append(
                Instruction(
                    kind="receive", outputs=(f"{source}@{m}",), peer=stage - 1, microbatch=m
                )
            )
        if not last:
            result = f"h{stage + 1}@{m}"
            made.append(
                Instruction(
                    kind="run",
                    task=f"forward{stage}",
                    phase="forward",
                    stage=stage,
                    microbatch=m,
                    inputs=(f"{source}@{m}", weight),
                    outputs=(result,),
                )
            )
            made.append(Instruction(kind="send", inputs=(result,), peer=stage + 1, microbatch=m))
            made.append(Instruction(kind="free", inputs=(result,)))

    def backward(m: int) -> None:
        back = f"d{stage - 1}@{m}"
        inputs: tuple[str, ...]
        outputs: tuple[str, ...]
        if last:
            inputs = (f"{source}@{m}", weight, f"y@{m}", total, loss)
            outputs = (back, total, loss)
        else:
            made.append(
                Instruction(
                    kind="receive", outputs=(f"d{stage}@{m}",), peer=stage + 1, microbatch=m
                )
            )
            inputs = (f"{source}@{m}", weight, f"d{stage}@{m}", total)
            outputs = (back, total)
        made.append(
            Instruction(
                kind="run",
                task=f"backward{stage}",
                phase="backward",
                stage=stage,
                microbatch=m,
                inputs=inputs,
                outputs=outputs,
            )
        )
        if stage > 0:
            made.append(Instruction(kind="send", inputs=(back,), peer=stage - 1, microbatch=m))
        used = [back, f"{source}@{m}", f"y@{m}" if last else f"d{stage}@{m}"]
        made.append(Instruction(kind="free", inputs=tuple(used)))

    ahead = min(count, num_stages - stage)
    for m in range(ahead):
        forward(m)
    for m in range(count):
        backward(m)
        if m + ahead < count:
            forward(m + ahead)
    made.append(
        Instruction(
            kind="run",
            task=f"update{stage}",
            phase="update",
            inputs=(weight, total),
            outputs=(f"new_{weight}",),
        )
    )
    made.append(Instruction(kind="free", inputs=(total,) if last else (total, loss)))
    return tuple(made)


@pytest.fixture
def pipeline():
    return make_pipeline


@pytest.fixture
def meshes():
    """Return a function that cuts the host devices into equal (data, model) meshes."""

    def make(count: int, shape: tuple[int, int] = (2, 2)) -> list[Mesh]:
        size = shape[0] * shape[1]
        devices = np.array(jax.devices()[: count * size]).reshape(count, *shape)
        return [Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2) for grid in devices]

    return make
