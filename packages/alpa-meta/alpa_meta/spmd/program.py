"""A planned jaxpr as one shard_map, and the collectives it consists of."""

from __future__ import annotations

import jax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_interchange import LogicalMesh, ShardingSpec
from alpa_meta import compat
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.compat import ClosedJaxpr, dtype_of, shape_of
from alpa_meta.spmd.bucketing import BucketLimits
from alpa_meta.spmd.collectives import CollectiveLog, Collectives
from alpa_meta.spmd.evaluation import evaluate
from alpa_meta.spmd.plan import JaxprPlan
from alpa_meta.types import Function
from ilp_sharding.strategies import Conversions


def partition_spec(spec: ShardingSpec) -> PartitionSpec:
    """Return the jax partition spec of the array that stands for a value of `spec`.

    An unreduced sum is an array with one more dim in front, one entry per device along the partial
    axes, and sharded over them.
    """
    dims = [axes or None for axes in spec.dims]
    return PartitionSpec(*([spec.partial, *dims] if spec.partial else dims))


def global_shape(shape: tuple[int, ...], spec: ShardingSpec, mesh: LogicalMesh) -> tuple[int, ...]:
    """Return the shape of the array that stands for a tensor of `shape` with `spec`."""
    return (mesh.size(spec.partial), *shape) if spec.partial else shape


def jax_sharding(spec: ShardingSpec, jax_mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the jax sharding of a value of `spec` on a jax mesh with the same axis names."""
    return NamedSharding(jax_mesh, partition_spec(spec))


def abstract_mesh(mesh: LogicalMesh) -> AbstractMesh:
    """Return the jax mesh without devices that has the axes of `mesh`."""
    return AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axes))


def shard_map_program(
    closed: ClosedJaxpr,
    plan: JaxprPlan,
    mesh: LogicalMesh,
    conversions: Conversions,
    collectives: Collectives | None = None,
    buckets: BucketLimits | None = None,
    in_blocks: bool = False,
) -> Function[list[Array]]:
    """Return a function of global arrays that runs the planned jaxpr as one shard_map.

    With `buckets`, independent collectives are sent together; without, that is left to XLA.
    Without `collectives`, each trace makes its own, whose names begin anew (`in_blocks` is theirs).

    To be jitted by the caller with arguments sharded by `jax_sharding(spec, jax_mesh)`.
    """

    def on_device(*locals_: Array) -> list[Array]:
        values = [
            value[0] if spec.partial else value
            for value, spec in zip(locals_, plan.inputs, strict=True)
        ]
        emitted = collectives or Collectives(mesh, in_blocks=in_blocks)
        outputs = evaluate(closed, plan, values, mesh, conversions, emitted, buckets)
        return [
            jax.numpy.asarray(value)[None] if spec.partial else value
            for value, spec in zip(outputs, plan.outputs, strict=True)
        ]

    return jax.shard_map(
        on_device,
        mesh=abstract_mesh(mesh),
        in_specs=tuple(map(partition_spec, plan.inputs)),
        out_specs=[partition_spec(spec) for spec in plan.outputs],
        check_vma=False,
    )


def planned_collectives(
    closed: ClosedJaxpr, plan: JaxprPlan, mesh: LogicalMesh, conversions: Conversions
) -> tuple[PlannedCollective, ...]:
    """Return every collective of the planned program, by tracing it and noting what it emits."""
    log = CollectiveLog()
    program = shard_map_program(closed, plan, mesh, conversions, Collectives(mesh, log))
    shapes = [
        jax.ShapeDtypeStruct(global_shape(shape_of(var), spec, mesh), dtype_of(var))
        for var, spec in zip(compat.open_jaxpr(closed).invars, plan.inputs, strict=True)
    ]
    with compat.no_mesh():
        jax.eval_shape(program, *shapes)
    return log.all()
