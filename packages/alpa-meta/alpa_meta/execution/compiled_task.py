"""One task of a plan, ready to be compiled: its program, shardings, donations and XLA options."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING

import jax
from attrs import field, frozen
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_interchange import LogicalMesh, ShardingSpec, Strategy
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Var, dtype_of, no_mesh, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.execution.barriers import with_barriers
from alpa_meta.execution.combiners import combiner_options
from alpa_meta.execution.host_memory import memory_kinds, placed
from alpa_meta.execution.task_plan import task_plan
from alpa_meta.execution.tasks import Task
from alpa_meta.operators.elementwise import is_barrier
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.spmd import (
    HOST_BUCKETS,
    JaxprPlan,
    RegionPlan,
    completed_plan,
    constraint_program,
    global_shape,
    partition_spec,
    planned_collectives,
    shard_map_program,
)
from alpa_meta.types import Fields, Function

if TYPE_CHECKING:
    from ilp_sharding.strategies import Conversions

AnyMesh = Mesh | AbstractMesh
"""The mesh of a task: devices of this process, or the grid of a mesh of others."""


@frozen(eq=False)
class CompiledTask:
    """One task ready to run: its jaxpr and plan, the logical mesh, and its function of arrays.

    `donated` are positions of operands that it may overwrite, `options` XLA's. Of a task for
    inspection, `jax_mesh` is None. `given` and `returned` are scalars, whole on every device, that
    the function takes and gives behind those of the task.
    """

    task: Task
    closed: ClosedJaxpr
    plan: JaxprPlan
    mesh: LogicalMesh
    jax_mesh: AnyMesh | None
    conversions: Conversions
    run: Function[tuple[jax.Array, ...]]
    donated: tuple[int, ...] = ()
    options: Mapping[str, str | bool | int | float] = field(factory=dict)
    executor: str = "shard_map"
    kinds: Mapping[str, str] = field(factory=dict)  # of memory, of values not on the devices
    given: tuple[jax.ShapeDtypeStruct, ...] = ()
    returned: tuple[jax.ShapeDtypeStruct, ...] = ()

    @functools.cached_property
    def function(self) -> jax.stages.Wrapped:
        """The task jitted."""
        options: Fields = {"donate_argnums": self.donated}
        if self.options:
            options["compiler_options"] = dict(self.options)
        if self.jax_mesh is not None:
            inputs, outputs = self.shardings()
            options |= {"in_shardings": inputs, "out_shardings": outputs}
        return jax.jit(self.run, **options)

    def shardings(self) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """Return the shardings of the operands and of the results on the task's mesh."""
        mesh, spec = self.jax_mesh, self.task.spec
        assert mesh is not None

        def of(names: Sequence[str], specs: Sequence[ShardingSpec]) -> tuple[NamedSharding, ...]:
            return tuple(
                placed(mesh, partition_spec(one), self.kinds.get(name))
                for name, one in zip(names, specs, strict=True)
            )

        whole = NamedSharding(mesh, PartitionSpec())
        return (
            (*of(spec.inputs, self.plan.inputs), *(whole for _ in self.given)),
            (*of(spec.outputs, self.plan.outputs), *(whole for _ in self.returned)),
        )

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Return the global shapes and shardings of the function's operands."""
        shapes = []
        names = self.task.spec.inputs
        for var, name, spec in zip(self.task.invars, names, self.plan.inputs, strict=True):
            shape = global_shape(tuple(shape_of(var)), spec, self.mesh)
            sharding = None
            if self.jax_mesh is not None:
                sharding = placed(self.jax_mesh, partition_spec(spec), self.kinds.get(name))
            shapes.append(jax.ShapeDtypeStruct(shape, dtype_of(var), sharding=sharding))
        for one in self.given:
            assert self.jax_mesh is not None
            whole = NamedSharding(self.jax_mesh, PartitionSpec())
            shapes.append(jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole))
        return shapes

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """Return the task compiled by XLA."""
        if isinstance(self.jax_mesh, AbstractMesh):
            raise PlanError(
                f"task {self.task.spec.name!r} is compiled by the workers of its mesh; to see "
                "compiled programs here, compile the plan with runtime='in-process'"
            )
        return self.lower().compile()

    def lower(self) -> jax.stages.Lowered:
        """Return the task lowered for XLA."""
        with no_mesh():
            return self.function.lower(*self.arguments())

    @functools.cached_property
    def planned(self) -> tuple[PlannedCollective, ...]:
        """Return the collectives the plan prescribes for one run of the task."""
        return planned_collectives(self.closed, self.plan, self.mesh, self.conversions)


def compile_together(tasks: Iterable[CompiledTask]) -> None:
    """Compile tasks side by side, as their first runs would one after another.

    What does not compile is left to its run, whose error names the instruction.
    """
    programs = {task.run: task for task in tasks}.values()  # which tasks may share
    lowered = [task.lower() for task in programs]  # in this thread, whose settings of jax count

    def compiled(one: jax.stages.Lowered) -> None:
        with contextlib.suppress(Exception):
            one.compile()

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(compiled, lowered))


KEEPING_BARRIERS = MappingProxyType({"xla_disable_hlo_passes": "cse_barrier_expander"})
"""XLA's option to keep barriers on host devices, where it drops them and merges what a layer
computes again with the first run."""


def compile_task(
    planned: Planned,
    task: Task,
    jax_mesh: AnyMesh | None,
    donate: bool = True,
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
    platform: str | None = None,
) -> CompiledTask:
    """Return `task` ready to run on `jax_mesh` (None: for inspection only).

    Without `donate`, inputs of the step are not overwritten. `compiler_options` are XLA's.
    `platform` is "cpu" or "gpu", of a mesh of other processes; of devices, it is theirs.
    """
    if isinstance(jax_mesh, Mesh):
        platform = jax_mesh.devices.flat[0].platform
    stage = task.spec.stage
    selection = planned.selections[stage]
    sharding = planned.plan.shardings[stage]
    choice = sharding.solution.choice
    if choice is None:
        raise PlanError(f"stage {stage} of the plan has no sharding solution")
    specs = _task_specs(planned, task, stage)
    strategies: dict[JaxprEqn, Strategy | RegionPlan] = {
        eqn: selection.strategy(k, choice) for k, eqn in enumerate(selection.stage.eqns)
    }
    plan = task_plan(task, specs, strategies)
    on_host = platform == "cpu"
    if sharding.executor != "constraint" and not on_host:
        task, plan = with_barriers(planned, task, plan)
    closed = task.closed(planned.program)
    mesh = sharding.mesh.logical
    conversions = selection.costs.conversions
    buckets = HOST_BUCKETS if on_host else None
    if sharding.executor == "constraint":
        plan = completed_plan(plan)
        program = constraint_program(closed, plan, mesh, jax_mesh)
    else:
        program = shard_map_program(
            closed, plan, mesh, conversions, buckets=buckets, in_blocks=on_host
        )

    kinds = memory_kinds(planned.program, planned.tasks, jax_mesh)

    fetched = {
        k: placed(jax_mesh, partition_spec(plan.inputs[k]), "device")
        for k, name in enumerate(task.spec.inputs)
        if name in kinds and jax_mesh is not None
    }

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        values = list(operands)
        for k, sharding in fetched.items():
            values[k] = jax.device_put(values[k], sharding)
        return tuple(program(*values))

    run.__name__ = task.spec.name.replace(".", "_")
    kept = () if donate else {leaf.path for leaf in planned.program.inputs}
    donated = tuple(
        k for k, n in enumerate(task.spec.inputs) if n in task.spec.donated and n not in kept
    )
    chosen = dict(compiler_options or {})
    if platform == "gpu":
        chosen = {**combiner_options(mesh), **chosen}
    if on_host and any(map(is_barrier, task.eqns)):
        chosen = {**KEEPING_BARRIERS, **chosen}
    return CompiledTask(
        task,
        closed,
        plan,
        mesh,
        jax_mesh,
        conversions,
        run,
        donated,
        chosen,
        sharding.executor,
        kinds,
    )


def _task_specs(planned: Planned, task: Task, stage: int) -> dict[Var, ShardingSpec]:
    """Return the spec of every value at the border of a task, accumulators included.

    New state leaves the task laid out as the state it replaces.
    """
    selection = planned.selections[stage]
    choice = planned.plan.shardings[stage].solution.choice
    assert choice is not None
    value_of = {acc: value for value, acc in planned.tasks.accumulators.items()}
    replaced = {new: old for new, old in selection.stage.carried if old in selection.sources}
    specs: dict[Var, ShardingSpec] = {}

    def spec(var: Var) -> ShardingSpec:
        value = value_of.get(var, var)
        return selection.spec(replaced.get(value, value), choice)

    for var in (*task.invars, *task.outvars):
        specs[var] = spec(var)
    for position, value in task.follows.items():
        specs[value] = spec(value)
        for var in task.eqns[position].outvars:
            if var not in selection.sources:
                rank = len(shape_of(var))
                specs[var] = specs[value] if rank else ShardingSpec((), specs[value].partial)
    return specs
