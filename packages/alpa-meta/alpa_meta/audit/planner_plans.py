"""Audits of a corpus model under the planner's plan, on host devices or for described GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from attrs import frozen
from jax.sharding import AxisType, Mesh

from alpa_interchange import LogicalMesh
from alpa_meta.api import parallelize
from alpa_meta.audit.executable import ExecutableAudit, audit_executable
from alpa_meta.audit.memory import memory_check
from alpa_meta.audit.numerics import NumericsCheck, numerics_check
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.target import parse_target, target_devices
from alpa_meta.corpus import CorpusModel
from alpa_meta.executable import CompiledTask, compile_task
from alpa_meta.options import Options


@frozen
class _Tasks:
    """The tasks of a plan compiled for devices that need not exist; `Auditable`."""

    tasks: Mapping[str, CompiledTask]

    def compiled_texts(self) -> Mapping[str, str]:
        return {name: task.compiled.as_text() for name, task in self.tasks.items()}

    def planned_collectives(self) -> Mapping[str, tuple[PlannedCollective, ...]]:
        return {name: task.planned for name, task in self.tasks.items()}

    def logical_mesh(self, task: str) -> LogicalMesh:
        return self.tasks[task].mesh


def audit_planned(
    model: CorpusModel, cluster: str, options: Options, *, numerics: bool = True
) -> ExecutableAudit:
    """Return the audit of the planner's plan of `model` for `cluster`.

    Host devices ("host:8") are compiled for and run; any other cluster is compiled for its GPUs
    ("h100:8") without them.
    """
    step = parallelize(model.train_step, cluster=cluster, options=options)
    planned = step.lower(model.state, model.batch).planned
    if cluster.startswith("host:"):
        check = _compare(model, step) if numerics else None
        return audit_executable(
            step.executable,
            backend="cpu",
            memory={
                name: memory_check(task.compiled, judge_peak=False)
                for name, task in step.executable.tasks.items()
            },
            numerics=check,
        )
    devices = target_devices(*parse_target(cluster))
    meshes = [_mesh(devices, sharding.mesh) for sharding in planned.plan.shardings]
    tasks = {
        task.spec.name: compile_task(planned, task, meshes[task.spec.mesh])
        for task in planned.tasks.tasks
    }
    return audit_executable(
        _Tasks(tasks),
        backend="cuda",
        memory={name: memory_check(task.compiled) for name, task in tasks.items()},
    )


def _mesh(devices: Sequence[Any], placed: Any) -> Mesh:
    chosen = np.array([devices[index] for index in placed.device_ids])
    return Mesh(
        chosen.reshape(placed.logical.shape),
        placed.logical.axis_names,
        axis_types=(AxisType.Auto,) * len(placed.logical.axes),
    )


def _compare(model: CorpusModel, step: Any) -> NumericsCheck:
    """Return the check of one parallel step against the same step on one device."""
    state = jax.jit(model.make_state)(jax.random.key(0))
    batch = jax.jit(model.make_batch)(jax.random.key(1))
    expected = (state, batch)
    parallel = jax.tree.map(_on_host, step(jax.tree.map(jax.numpy.copy, state), batch))
    return numerics_check(parallel, jax.jit(model.train_step), expected, jax.random.key(0))


def _on_host(leaf: Any) -> Any:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
        return jax.random.wrap_key_data(jax.device_get(leaf))
    return jax.device_get(leaf)
