"""Audits of a corpus model under the planner's plan, on host devices or for described GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from attrs import evolve, frozen
from jax.sharding import AxisType, Mesh

from alpa_interchange import LogicalMesh
from alpa_meta.api import parallelize
from alpa_meta.audit.executable import ExecutableAudit, audit_tasks
from alpa_meta.audit.memory import TOLERANCE
from alpa_meta.audit.numerics import Reference, single_device_reference
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.target import CUBLAS, NO_TILES, parse_target, target_devices
from alpa_meta.execution.compiled_task import CompiledTask, compile_task
from alpa_meta.execution.tasks import Task
from alpa_meta.options import Options
from alpa_meta.own_step import Runnable
from alpa_meta.planning.chosen_plan import Planned

if TYPE_CHECKING:
    from alpa_interchange import DeviceMesh
    from alpa_meta.api import AnyStep

SCHEDULED_SHARE = 0.8 * 0.95
"""Of a GPU's memory, what XLA's scheduler keeps to (xla/service/gpu/gpu_hlo_schedule.cc). Below, it
trades idle memory for overlap: of gpt-remat at small on H100s it keeps the operands of all weight
gradients to the end. So a plan is compiled for a GPU with as much memory as the plan says it needs
and a check lets pass, at most what the device has or the options say: of a larger program XLA
computes parts again. (Without the tolerance gpt at small, which needs 0.3 % more than its plan
says, is compiled to 10 % less.)
"""


@frozen
class _Tasks:
    """The tasks of a plan compiled for devices that need not exist; `Auditable`."""

    tasks: Mapping[str, CompiledTask]

    def compiled_texts(self) -> Mapping[str, str]:
        return {name: task.compiled.as_text() or "" for name, task in self.tasks.items()}

    def planned_collectives(self) -> Mapping[str, tuple[PlannedCollective, ...]]:
        return {name: task.planned for name, task in self.tasks.items()}

    def logical_mesh(self, task: str) -> LogicalMesh:
        return self.tasks[task].mesh


def audit_planned(
    model: Runnable,
    cluster: str,
    options: Options,
    *,
    numerics: bool = True,
    reference: Reference | None = None,
) -> ExecutableAudit:
    """Return the audit of the planner's plan of `model` for `cluster`.

    Host devices ("host:8") are compiled for and run; any other cluster is compiled for its GPUs
    ("h100:8") without them.
    """
    step = parallelize(model.train_step, cluster=cluster, options=options)
    if cluster.startswith("host:"):
        return audit_on_host(model, step, reference if numerics else None, numerics=numerics)
    planned = step.lower(model.state, model.batch).planned
    target, num_devices = parse_target(cluster)
    needed = (1 + TOLERANCE) * max(planned.plan.device_bytes) / SCHEDULED_SHARE
    has = options.memory or target.memory_bytes
    target = evolve(target, memory_bytes=int(min(needed, has)))
    devices = target_devices(target, num_devices)
    meshes = [_mesh(devices, sharding.mesh) for sharding in planned.plan.shardings]
    tasks = {
        task.spec.name: _compiled(planned, task, meshes[task.spec.stage])
        for task in planned.tasks.tasks
    }
    return audit_tasks(_Tasks(tasks), tasks, planned, backend="cuda")


def _compiled(planned: Planned, task: Task, mesh: Mesh) -> CompiledTask:
    """Return a task compiled for GPUs that are not there."""
    found = compile_task(planned, task, mesh)
    try:
        found.compiled  # noqa: B018  (compiles)
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
        return compile_task(planned, task, mesh, compiler_options=CUBLAS)
    return found


def audit_on_host(
    model: Runnable, step: AnyStep, reference: Reference | None = None, *, numerics: bool = True
) -> ExecutableAudit:
    """Return the audit of a parallel step of `model` on this process's devices."""
    if not numerics:
        audit: ExecutableAudit = step.audit(model.state, model.batch)
    else:
        audit = step.audit(*model.arguments(), reference=reference)
    return audit


def reference_of(model: Runnable) -> Reference:
    """Return the single-device result of a step of `model`, for any number of its audits."""
    plain = jax.jit(model.train_step)
    return single_device_reference(plain, model.arguments(), jax.random.key(0))


def _mesh(devices: Sequence[jax.Device], placed: DeviceMesh) -> Mesh:
    chosen = np.array([devices[index] for index in placed.device_ids])
    return Mesh(
        chosen.reshape(placed.logical.shape),
        placed.logical.axis_names,
        axis_types=(AxisType.Auto,) * len(placed.logical.axes),
    )
