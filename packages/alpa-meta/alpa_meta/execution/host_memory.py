"""State that lives in the memory of the hosts between steps (`Options(offload="moments")`).

The update takes the optimiser's arrays from there and puts the new ones back: transfers are part of
the task that runs it (`jax.device_put` between memory kinds), so XLA may overlap them with the rest
of the task. The plan prices them one after another, both ways, and counts the arrays as held from
their first to their last reader in the update (`intra_op.builder`).

jax offers the memory by its name, "pinned_host", on GPUs, TPUs and host devices; on the latter it
is the devices' own. Devices that are only described (`audit.target`) offer none, so that programs
compiled for them ahead of time hold everything on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_meta.errors import PlanError
from alpa_meta.execution.tasks import Tasks
from alpa_meta.step.program import Program


def memory_kinds(
    program: Program, tasks: Tasks, mesh: Mesh | AbstractMesh | None
) -> Mapping[str, str]:
    """Return {name: memory kind} of the values of tasks on `mesh` that are not in its devices'
    memory: inputs of the step, and what replaces them."""
    kinds = {leaf.path: leaf.memory for leaf in program.inputs if leaf.memory != "device"}
    if not kinds or mesh is None:
        return {}
    if isinstance(mesh, AbstractMesh):
        raise PlanError(
            f"the plan keeps {next(iter(kinds))} in the memory of the hosts, which runtime='ray' "
            "does not do yet; plan without offload"
        )
    offered = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    if not offered:
        return {}
    for path, kind in kinds.items():
        if kind not in offered:
            raise PlanError(
                f"the plan keeps {path} in memory {kind!r}, but {mesh.devices.flat[0]} has only "
                f"{', '.join(sorted(offered))}; plan without offload"
            )
    replacing = {name: kinds[path] for name, path in tasks.carry.items() if path in kinds}
    return {**kinds, **replacing}


def placed(mesh: Mesh | AbstractMesh, spec: PartitionSpec, kind: str | None) -> NamedSharding:
    """Return the sharding of a value in memory `kind`, by default that of the devices."""
    sharding = NamedSharding(mesh, spec)
    return sharding if kind is None else sharding.with_memory_kind(kind)
