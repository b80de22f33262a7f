"""Audits one planned program on one mesh: compiled, accounted for, measured, compared.

This is the audit below the product's `Executable`: it takes a flat jaxpr and the plan of its
equations, so that any plan, also a random one, can be audited.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from attrs import frozen
from jax.sharding import NamedSharding

from alpa_interchange import LogicalMesh, ShardingSpec
from alpa_meta import compat
from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.audit.memory import MemoryCheck, memory_check
from alpa_meta.audit.numerics import NumericsCheck, Reference, single_device_reference
from alpa_meta.audit.report import AuditReport
from alpa_meta.audit.target import SOUND, compile_for, compiler_options
from alpa_meta.compat import ClosedJaxpr, Var, dtype_of, shape_of
from alpa_meta.spmd import (
    JaxprPlan,
    global_shape,
    partition_spec,
    planned_collectives,
    shard_map_program,
)
from alpa_meta.types import Function, PyTree
from ilp_sharding.strategies import Conversions

if TYPE_CHECKING:
    from alpa_meta.audit.target import XlaOption


@frozen(kw_only=True)
class ProgramAudit:
    """What the audit of one program found; a check that was not asked for is None."""

    collectives: AuditReport
    memory: MemoryCheck
    numerics: NumericsCheck | None

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return (
            self.collectives.ok and self.memory.ok and (self.numerics is None or self.numerics.ok)
        )

    def text(self) -> str:
        """Return the findings as plain text."""
        found = [self.collectives.text(), self.memory.text()]
        return "\n".join([*found, *([] if self.numerics is None else [self.numerics.text()])])


def audit_program(
    jaxpr: ClosedJaxpr,
    plan: JaxprPlan,
    mesh: LogicalMesh,
    conversions: Conversions,
    devices: Sequence[jax.Device],
    arguments: Sequence[PyTree] | None = None,
    reference: Reference | None = None,
) -> ProgramAudit:
    """Return the audit of the closed, inlined `jaxpr` run by `plan` on `devices`.

    `devices` may be described ones (`target_devices`). With `arguments`, the flat inputs, the
    program also runs and is compared with the single-device run of the same jaxpr, which
    `reference` saves computing again (`reference_of_program`). A difference counts once it is seen
    with the slower code generator too (`target.SOUND`).
    """
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    compiled = compile_plan(jaxpr, plan, mesh, conversions, devices, sizes)
    report = account(
        planned_collectives(jaxpr, plan, mesh, conversions),
        compiled_collectives(compiled.as_text() or ""),
        sizes,
        backend="cpu" if devices[0].platform == "cpu" else "cuda",
    )
    numerics = None
    if arguments is not None:
        reference = reference or reference_of_program(jaxpr, arguments)
        numerics = reference.check(_run(plan, compiled, arguments))
        if not numerics.ok and compiler_options(devices[0].platform) != SOUND:
            sound = compile_plan(jaxpr, plan, mesh, conversions, devices, sizes, SOUND)
            numerics = reference.check(_run(plan, sound, arguments))
    return ProgramAudit(
        collectives=report,
        memory=memory_check(compiled, judge_peak=devices[0].platform != "cpu"),
        numerics=numerics,
    )


def compile_plan(
    jaxpr: ClosedJaxpr,
    plan: JaxprPlan,
    mesh: LogicalMesh,
    conversions: Conversions,
    devices: Sequence[jax.Device],
    axis_sizes: Mapping[str, int],
    options: Mapping[str, XlaOption] | None = None,
) -> jax.stages.Compiled:
    """Return the planned program compiled for `devices`, by default as cheaply as XLA can."""
    inputs = compat.open_jaxpr(jaxpr).invars
    shapes = [_global(var, spec, mesh) for var, spec in zip(inputs, plan.inputs, strict=True)]
    program = shard_map_program(jaxpr, plan, mesh, conversions)
    specs = [partition_spec(spec) for spec in plan.inputs]
    return compile_for(devices, axis_sizes, program, shapes, specs, options=options)


def _global(var: Var, spec: ShardingSpec, mesh: LogicalMesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(global_shape(shape_of(var), spec, mesh), dtype_of(var))


def _run(
    plan: JaxprPlan, compiled: jax.stages.Compiled, arguments: Sequence[PyTree]
) -> list[PyTree]:
    """Return the results of a compiled plan on the host, unreduced sums completed."""
    shardings: Sequence[NamedSharding] = compiled.input_shardings[0]
    placed = [
        jax.device_put(value, sharding)
        for value, sharding in zip(arguments, shardings, strict=True)
    ]
    whole = [
        value.sum(axis=0) if spec.partial else value
        for value, spec in zip(compiled(*placed), plan.outputs, strict=True)
    ]
    return [jax.device_get(value) for value in whole]


def reference_of_program(jaxpr: ClosedJaxpr, arguments: Sequence[PyTree]) -> Reference:
    """Return the single-device results of `jaxpr` on flat arguments, for any number of plans."""
    return single_device_reference(single_device(jaxpr), tuple(arguments), jax.random.key(0))


def single_device(jaxpr: ClosedJaxpr) -> Function[PyTree]:
    """Return the function of flat arrays that runs `jaxpr` on one device; it can be traced."""
    device = jax.devices("cpu")[0]

    def whole(*values: PyTree) -> list[jax.Array]:
        return jax.core.eval_jaxpr(compat.open_jaxpr(jaxpr), compat.consts(jaxpr), *values)

    run = jax.jit(whole, compiler_options=dict(SOUND))

    @functools.wraps(whole)
    def on_one(*values: PyTree) -> PyTree:
        if any(isinstance(value, jax.core.Tracer) for value in values):
            return whole(*values)
        return run(*(jax.device_put(value, device) for value in values))

    return on_one
