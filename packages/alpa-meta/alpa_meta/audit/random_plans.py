"""Audits of a corpus model under random plans: a program must be its plan whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from attrs import frozen

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.audit.numerics import Reference
from alpa_meta.audit.program import ProgramAudit, audit_program, reference_of_program
from alpa_meta.compat import ClosedJaxpr
from alpa_meta.own_step import Runnable
from alpa_meta.spmd import random_plan
from alpa_meta.step.trace import trace
from alpa_meta.types import PyTree
from ilp_sharding.strategies import Conversions

BANDWIDTH = 1e10
LATENCY = 1e-6


@frozen(kw_only=True)
class PlanAudit:
    """The audit of one model under one plan."""

    model: str
    plan: str
    audit: ProgramAudit

    def text(self) -> str:
        """Return one line for people."""
        audit = self.audit
        checks = [audit.collectives.summary()]
        checks += [] if audit.numerics is None else [audit.numerics.text()]
        return f"{'ok  ' if audit.ok else 'FAIL'} {self.model} {self.plan}: {'; '.join(checks)}"


def mesh_of_shape(shape: Sequence[int]) -> LogicalMesh:
    """Return a logical mesh of `shape` with axes "x", "y", "z", "w" and equal links."""
    names = "xyzw"
    if not 1 <= len(shape) <= len(names):
        raise ValueError(f"a mesh must have 1 to {len(names)} axes, got the shape {tuple(shape)}")
    return LogicalMesh(
        axes=tuple(
            MeshAxis(name=name, size=size, bandwidth=BANDWIDTH, latency=LATENCY)
            for name, size in zip(names, shape, strict=False)
        )
    )


@frozen(eq=False)
class RandomAudits:
    """A corpus model traced, and run on one device, once for any number of random plans of it.

    `arguments` and `reference` are None where results are not compared.
    """

    model: Runnable
    jaxpr: ClosedJaxpr
    arguments: Sequence[PyTree] | None = None
    reference: Reference | None = None

    def audit(self, mesh: LogicalMesh, devices: Sequence[jax.Device], seed: int) -> PlanAudit:
        """Return the audit under the random plan that `seed` draws for `mesh`."""
        if len(devices) < mesh.num_devices:
            raise ValueError(
                f"the mesh {mesh.shape} needs {mesh.num_devices} devices, got {len(devices)}; set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.num_devices}"
            )
        found = audit_program(
            self.jaxpr,
            random_plan(self.jaxpr, mesh, seed),
            mesh,
            Conversions(mesh, _seconds),
            devices[: mesh.num_devices],
            self.arguments,
            self.reference,
        )
        return PlanAudit(model=self.model.name, plan=f"random plan {seed}", audit=found)


def random_audits(model: Runnable, *, numerics: bool = True) -> RandomAudits:
    """Return `model` ready to be audited under random plans, with results unless told."""
    jaxpr = flat_jaxpr(model)
    if not numerics:
        return RandomAudits(model, jaxpr)
    arguments = jax.tree.leaves(model.arguments())
    return RandomAudits(model, jaxpr, arguments, reference_of_program(jaxpr, arguments))


def flat_jaxpr(model: Runnable) -> ClosedJaxpr:
    """Return the inlined jaxpr of the model's step, from flat (state, batch) to flat results."""
    leaves, structure = jax.tree.flatten((model.state, model.batch))

    def step(*flat: PyTree) -> list[ClosedJaxpr]:
        return jax.tree.leaves(model.train_step(*jax.tree.unflatten(structure, flat)))

    jaxpr, _ = trace(step, *leaves)
    return jaxpr


def _seconds(kind: str, bytes: float, axes: tuple[str, ...]) -> float:
    return LATENCY + bytes / BANDWIDTH
