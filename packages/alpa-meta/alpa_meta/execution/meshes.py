"""Where a plan runs: on devices of this process, or on meshes of other processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from alpa_interchange import ParallelPlan
from alpa_interchange.amounts import format_bytes
from alpa_meta.errors import PlanError
from alpa_meta.execution.compiled_task import AnyMesh, CompiledTask
from alpa_meta.types import Function
from mesh_runtime import Executable as Program
from mesh_runtime import InProcessRuntime, Runtime, memory_of
from resharding.jax_executor import reshard


class Meshes(Protocol):
    """The meshes of a plan: `stages` has that of each stage, `runtime` executes its schedule."""

    stages: tuple[AnyMesh, ...]
    runtime: Runtime

    def platform(self, stage: int) -> str | None:
        """Return "cpu" or "gpu" for meshes of other processes, None where devices tell."""

    def task(self, compiled: CompiledTask, held: Mapping[str, NamedSharding]) -> Program:
        """Return a task as the runtime runs it; `held` are the layouts it finds its operands in."""

    def function(
        self,
        function: Function[Sequence[jax.Array]],
        arguments: Sequence[jax.ShapeDtypeStruct],
        in_shardings: Sequence[NamedSharding] | None,
        out_shardings: Sequence[NamedSharding],
        stage: int,
    ) -> Program:
        """Return a function of arrays of the host as a program of a stage's mesh.

        Without `in_shardings`, every device has its arguments whole, or they are where they come
        from.
        """


class LocalMeshes:
    """The meshes of a plan made of devices of this process."""

    def __init__(
        self, plan: ParallelPlan, devices: Sequence[jax.Device] | None, trace: str
    ) -> None:
        devices = list(jax.devices() if devices is None else devices)
        needed = 1 + max(d for sharding in plan.shardings for d in sharding.mesh.device_ids)
        if needed > len(devices):
            raise PlanError(
                f"the plan is for {needed} devices of cluster {plan.cluster.name!r}, but this "
                f"process has {len(devices)}; plan for the devices there are, or, on a CPU, start "
                f"with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        stages = tuple(
            Mesh(
                np.array([devices[k] for k in sharding.mesh.device_ids]).reshape(
                    sharding.mesh.logical.shape
                ),
                sharding.mesh.logical.axis_names,
                axis_types=(AxisType.Auto,) * len(sharding.mesh.logical.axes),
            )
            for sharding in plan.shardings
        )
        self.stages: tuple[AnyMesh, ...] = stages
        meshes = stages[: plan.stage_plan.num_meshes]
        check_memory(
            plan,
            [
                (memory_of(list(mesh.local_devices)), mesh.local_devices[0].device_kind)
                for mesh in meshes
            ],
        )
        self.runtime: Runtime = InProcessRuntime(meshes, transfer=move, trace=trace)

    def platform(self, stage: int) -> str | None:
        """Return None: the devices tell."""
        return None

    def task(self, compiled: CompiledTask, held: Mapping[str, NamedSharding]) -> Program:
        """Return the jitted task; operands that it finds laid out otherwise are converted first."""
        others = {
            k: wanted.sharding
            for k, (name, wanted) in enumerate(
                zip(compiled.task.spec.inputs, compiled.arguments(), strict=False)
            )
            if not held[name].is_equivalent_to(wanted.sharding, len(wanted.shape))
        }
        function: jax.stages.Wrapped = compiled.function
        if not others:
            return function

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            placed = list(operands)
            for k, sharding in others.items():
                placed[k] = move(placed[k], sharding)
            results: Sequence[jax.Array] = function(*placed)
            return results

        return run

    def function(
        self,
        function: Function[Sequence[jax.Array]],
        arguments: Sequence[jax.ShapeDtypeStruct],
        in_shardings: Sequence[NamedSharding] | None,
        out_shardings: Sequence[NamedSharding],
        stage: int,
    ) -> Program:
        """Return the function jitted."""
        jitted = jax.jit(
            lambda *operands: tuple(function(*operands)), out_shardings=tuple(out_shardings)
        )

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            if in_shardings is not None:
                operands = jax.device_put(operands, tuple(in_shardings))
            results: Sequence[jax.Array] = jitted(*operands)
            return results

        return run


def check_memory(plan: ParallelPlan, meshes: Sequence[tuple[float | None, str]]) -> None:
    """Warn of a plan that needs more memory than jax may take of its devices: a cluster that is
    given by name has all that its devices have. `meshes` are the bytes that may be taken of each
    device, if it is known, and the kind of the devices."""
    for stage, needed in enumerate(plan.device_bytes):
        limit, kind = meshes[stage % len(meshes)]
        if limit is not None and needed > limit:
            warnings.warn(
                f"the plan needs {format_bytes(needed)} on each device of stage {stage}, but jax "
                f"may take only {format_bytes(limit)} of {kind}, so "
                "the step may run out of memory; let jax take more "
                "(XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, by default 0.75), or plan for what it may "
                f"take with memory={limit:.0f} (--memory {limit:.0f})",
                RuntimeWarning,
                stacklevel=2,
            )
            return


def move(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return `array` on another mesh by a resharding plan, without waiting; random keys by jax."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        moved: jax.Array = jax.device_put(array, sharding)
    else:
        moved = reshard(array, sharding, through="device")
    return moved
