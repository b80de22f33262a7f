"""A planned step compiled for devices: one jitted program per task, run by a mesh runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import field, frozen
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_interchange import Instruction, LogicalMesh, ShardingSpec, Strategy
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.compat import ClosedJaxpr, Var, dtype_of, no_mesh, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.execution.barriers import with_barriers
from alpa_meta.execution.combiners import combiner_options
from alpa_meta.execution.host_memory import memory_kinds, placed
from alpa_meta.execution.piecewise import parted, united
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
from alpa_meta.step.program import Leaf

if TYPE_CHECKING:
    from alpa_meta.audit.executable import ExecutableAudit
    from alpa_meta.audit.numerics import NumericsCheck
from mesh_runtime import InProcessRuntime, TraceEvent
from resharding.jax_executor import reshard


@frozen(eq=False)
class CompiledTask:
    """One task ready to run: its jaxpr and plan, the logical mesh, and the jitted function."""

    task: Task
    closed: ClosedJaxpr
    plan: JaxprPlan
    mesh: LogicalMesh
    jax_mesh: Mesh | None
    conversions: Any
    function: Any  # jitted
    executor: str = "shard_map"
    kinds: Mapping[str, str] = field(factory=dict)  # of memory, of values not on the devices

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Return the global shapes and shardings of the task's operands."""
        shapes = []
        names = self.task.spec.inputs
        for var, name, spec in zip(self.task.invars, names, self.plan.inputs, strict=True):
            shape = global_shape(tuple(shape_of(var)), spec, self.mesh)
            sharding = None
            if self.jax_mesh is not None:
                sharding = placed(self.jax_mesh, partition_spec(spec), self.kinds.get(name))
            shapes.append(jax.ShapeDtypeStruct(shape, dtype_of(var), sharding=sharding))
        return shapes

    @functools.cached_property
    def compiled(self) -> Any:
        """Return the task compiled by XLA."""
        with no_mesh():
            return self.function.lower(*self.arguments()).compile()

    @functools.cached_property
    def planned(self) -> tuple[PlannedCollective, ...]:
        """Return the collectives the plan prescribes for one run of the task."""
        return planned_collectives(self.closed, self.plan, self.mesh, self.conversions)


class Executable:
    """A plan compiled for this process's devices. Call it with the flat inputs of the step."""

    def __init__(
        self,
        planned: Planned,
        devices: Sequence[Any] | None = None,
        trace: str = "none",
        donate: bool = True,
    ):
        self.planned = planned
        self.plan = planned.plan
        devices = list(jax.devices() if devices is None else devices)
        needed = 1 + max(d for sharding in self.plan.shardings for d in sharding.mesh.device_ids)
        if needed > len(devices):
            raise PlanError(
                f"the plan is for {needed} devices of cluster {self.plan.cluster.name!r}, but this "
                f"process has {len(devices)}; plan for the devices there are, or, on a CPU, start "
                f"with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        self.stage_meshes = tuple(
            Mesh(
                np.array([devices[k] for k in sharding.mesh.device_ids]).reshape(
                    sharding.mesh.logical.shape
                ),
                sharding.mesh.logical.axis_names,
                axis_types=(AxisType.Auto,) * len(sharding.mesh.logical.axes),
            )
            for sharding in self.plan.shardings
        )
        self.meshes = self.stage_meshes[: len(self.plan.schedule.programs)]
        self.tasks = {
            task.spec.name: compile_task(planned, task, self.stage_meshes[task.spec.stage], donate)
            for task in planned.tasks.tasks
        }
        self._runtime = InProcessRuntime(self.meshes, transfer=move, trace=trace)
        self._runtime.load(
            self.plan.schedule,
            executables=self._functions(),
            shardings=self._shardings(),
            outputs=self._output_names(),
        )
        self._where = self._input_places()
        self._statistics = self._compiled_statistics()

    # ------------------------------------------------------------------ running

    @functools.cached_property
    def only_run(self) -> Instruction | None:
        """The one instruction of a plan that runs one task once; None for other plans."""
        runs = [i for program in self.plan.schedule.programs for i in program if i.kind != "free"]
        return runs[0] if len(runs) == 1 and runs[0].kind == "run" else None

    def __call__(self, inputs: Sequence[Any], computed: Sequence[bool] | None = None) -> list[Any]:
        """Return the array leaves of the step's result for those of its arguments, in order.

        Outputs that are not `computed` are None (by default all are).
        """
        with no_mesh():
            return self._run(inputs, computed)

    def _run(self, inputs: Sequence[Any], computed: Sequence[bool] | None) -> list[Any]:
        inputs = parted(self.planned.program, [*inputs, *self._given(inputs)])
        buffers: dict[str, Any] = {}
        placed = list(inputs)
        seen: set[int] = set()
        for k, leaf in enumerate(self.planned.program.inputs):
            if leaf.path not in self._where:
                continue
            if leaf.in_parts:
                buffers.update(self._microbatches(leaf, inputs[k]))
            else:
                buffers[leaf.path] = placed[k] = self._placed(leaf.path, inputs[k], seen)
        results = self._runtime.step(buffers)
        outputs = [self._output(output, results, placed) for output in self.planned.tasks.outputs]
        if computed is not None:
            outputs = [one if there else None for one, there in zip(outputs, computed, strict=True)]
        return united(self.planned.program, outputs)

    def _given(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what every microbatch is given beside the step's inputs, in their order; None for
        the totals, which the step adds up itself.
        """
        statistics = iter(self._statistics(inputs))
        numbers = np.arange(self.plan.num_microbatches, dtype=np.int32)
        values: dict[str, Callable[[], Any]] = {
            "number": lambda: numbers,
            "statistic": lambda: next(statistics),
            "part": lambda: next(statistics),
            "total": lambda: None,
        }
        given = self.planned.program.inputs
        return [values[leaf.role]() for leaf in given if leaf.role in values]

    def _compiled_statistics(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Return the program of the statistics of the whole batch, on the devices of the first
        stage: partitioned by XLA along the batch.
        """
        statistics = self.planned.program.statistics
        if statistics is None:
            return lambda _: ()
        mesh = self.meshes[0]
        whole = NamedSharding(mesh, PartitionSpec())
        along = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        places = [
            along if is_batch and shape_of(var)[0] % mesh.size == 0 else whole
            for var, is_batch in zip(
                statistics.closed.jaxpr.invars, statistics.of_batch, strict=True
            )
        ]
        run = jax.jit(jaxpr_as_fun(statistics.closed), in_shardings=places, out_shardings=whole)

        def compute(inputs: Sequence[Any]) -> Sequence[Any]:
            read = [inputs[k] for k in statistics.inputs]
            return run(*jax.device_put(read, places))  # type: ignore[no-any-return]

        return compute

    def _placed(self, path: str, value: Any, seen: set[int]) -> Any:
        """Return an input on its devices; one array given for two inputs is copied, as the step may
        overwrite each. `seen` are the ids of the arrays met so far.
        """
        if isinstance(value, jax.Array):
            if value.is_deleted():
                raise PlanError(
                    f"{path} was given away to an earlier step, which overwrote it; pass the state "
                    "that step returned, or keep old states with Options(donate=False)"
                )
            if id(value) in seen:
                value = jnp.copy(value)
            seen.add(id(value))
        sharding = self._where[path]
        if isinstance(value, jax.Array) and value.sharding == sharding:
            return value
        return jax.device_put(value, sharding)

    def _microbatches(self, leaf: Leaf, value: Any) -> dict[str, Any]:
        path, size = leaf.path, leaf.aval.shape[0]
        count = self.plan.num_microbatches
        if np.shape(value)[0] != size:
            raise PlanError(
                f"{path} has {np.shape(value)[0]} examples, the plan is for batches of {size}; "
                "plan again for the new batch size"
            )
        if count == 1:
            once = path in self.planned.tasks.graph.per_step
            return {path if once else f"{path}@0": value}
        part = size // count
        return {f"{path}@{k}": value[k * part : (k + 1) * part] for k in range(count)}

    def _output(self, output: Any, results: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
        if output.name is None:
            return (
                inputs[output.input] if output.input is not None else jnp.asarray(output.constant)
            )
        if output.concatenate is not None:
            parts = [results[f"{output.name}@{k}"] for k in range(self.plan.num_microbatches)]
            return jnp.concatenate(parts, axis=output.concatenate)
        return results[output.name] if output.name in results else results[f"{output.name}@0"]

    def _output_names(self) -> list[str]:
        graph = self.planned.tasks.graph
        per_step = set(graph.per_step)
        names = []
        for name in graph.outputs:
            if name in per_step:
                names.append(name)
            else:
                names += [f"{name}@{k}" for k in range(self.plan.num_microbatches)]
        return names

    # ------------------------------------------------------------------ where values live

    def _functions(self) -> dict[str, Any]:
        """Return the function of each task; where stages that share a mesh lay out one value in two
        ways, the task that finds it laid out otherwise converts it first.
        """
        if len(self.meshes) == len(self.stage_meshes):
            return {name: task.function for name, task in self.tasks.items()}
        held = self._shardings()
        for compiled in self.tasks.values():
            spec, stage = compiled.task.spec, self.stage_meshes[compiled.task.spec.stage]
            for name, found in zip(spec.outputs, compiled.plan.outputs, strict=True):
                if name not in spec.inputs:
                    kind = compiled.kinds.get(name)
                    held[spec.mesh][name] = placed(stage, partition_spec(found), kind)
        return {
            name: _converting(compiled, held[compiled.task.spec.mesh])
            for name, compiled in self.tasks.items()
        }

    def _shardings(self) -> list[dict[str, NamedSharding]]:
        shardings: list[dict[str, NamedSharding]] = [{} for _ in self.meshes]
        for compiled in self.tasks.values():
            mesh, stage = compiled.task.spec.mesh, self.stage_meshes[compiled.task.spec.stage]
            for name, spec in zip(compiled.task.spec.inputs, compiled.plan.inputs, strict=True):
                found = placed(stage, partition_spec(spec), compiled.kinds.get(name))
                shardings[mesh].setdefault(name, found)
        graph = self.planned.tasks.graph
        paths = {
            leaf.path: var
            for var, leaf in zip(
                self.planned.program.jaxpr.invars, self.planned.program.inputs, strict=True
            )
        }
        for name, home in zip(graph.inputs, graph.home, strict=True):
            if name not in shardings[home]:
                spec = ShardingSpec.replicated(len(shape_of(paths[name])))
                shardings[home][name] = NamedSharding(self.meshes[home], partition_spec(spec))
        return shardings

    def _input_places(self) -> dict[str, NamedSharding]:
        """Return the sharding each input has on its home mesh, for inputs that some task reads."""
        graph = self.planned.tasks.graph
        shardings = self._shardings()
        read = {name for task in self.tasks.values() for name in task.task.spec.inputs}
        return {
            name: shardings[home][name]
            for name, home in zip(graph.inputs, graph.home, strict=True)
            if name in read
        }

    def input_sharding(self, path: str) -> NamedSharding | None:
        """Return where an input lives; None if the step never reads it."""
        return self._where.get(path)

    # ------------------------------------------------------------------ looking inside

    def trace(self, mode: str) -> None:
        """Trace the steps from now on: "none", "ready" (asynchronous) or "blocking" (exact)."""
        self._runtime.trace_mode = mode

    @property
    def tracing(self) -> bool:
        """Whether steps are traced."""
        return self._runtime.trace_mode != "none"

    @property
    def last_trace(self) -> tuple[TraceEvent, ...]:
        """The executed instructions of the last step, if tracing is on."""
        return self._runtime.trace

    def compiled_texts(self) -> dict[str, str]:
        """Return the compiled HLO text of every task."""
        return {name: task.compiled.as_text() for name, task in self.tasks.items()}

    def planned_collectives(self) -> dict[str, tuple[PlannedCollective, ...]]:
        """Return the planned collectives of every task."""
        return {name: task.planned for name, task in self.tasks.items()}

    def logical_mesh(self, task: str) -> LogicalMesh:
        """Return the logical mesh a task runs on."""
        return self.tasks[task].mesh

    def audit(self, numerics: NumericsCheck | None = None) -> ExecutableAudit:
        """Return the audit of every compiled task: collectives against the plan, and memory.

        `numerics`, if given, becomes part of the verdict; `ParallelStep.audit` makes it.
        """
        from alpa_meta.audit.executable import audit_tasks

        platform = self.meshes[0].devices.flat[0].platform
        backend = "cpu" if platform == "cpu" else "cuda"
        return audit_tasks(self, self.tasks, self.planned, backend=backend, numerics=numerics)

    def close(self) -> None:
        """Drop the runtime's buffers."""
        self._runtime.close()


def _converting(compiled: CompiledTask, held: Mapping[str, NamedSharding]) -> Any:
    """Return the function of a task for operands laid out as `held` on its mesh."""
    others = {
        k: wanted.sharding
        for k, (name, wanted) in enumerate(
            zip(compiled.task.spec.inputs, compiled.arguments(), strict=True)
        )
        if not held[name].is_equivalent_to(wanted.sharding, len(wanted.shape))
    }
    if not others:
        return compiled.function

    def run(*operands: Any) -> Any:
        placed = list(operands)
        for k, sharding in others.items():
            placed[k] = move(placed[k], sharding)
        return compiled.function(*placed)

    return run


def move(array: jax.Array, sharding: Any) -> Any:
    """Return `array` on another mesh: by a resharding plan on host devices, else by jax."""
    host = sharding.mesh.devices.flat[0].platform == "cpu"
    if host and not jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return reshard(array, sharding)
    return jax.device_put(array, sharding)


KEEPING_BARRIERS = MappingProxyType({"xla_disable_hlo_passes": "cse_barrier_expander"})
"""XLA's option to keep barriers on host devices, where it drops them and merges what a layer
computes again with the first run."""


def compile_task(
    planned: Planned,
    task: Task,
    jax_mesh: Mesh | None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledTask:
    """Return `task` as a jitted function on `jax_mesh` (None: for inspection only).

    Without `donate`, inputs of the step are not overwritten. `compiler_options` are XLA's.
    """
    stage = task.spec.stage
    selection = planned.selections[stage]
    sharding = planned.plan.shardings[stage]
    choice = sharding.solution.choice
    if choice is None:
        raise PlanError(f"stage {stage} of the plan has no sharding solution")
    specs = _task_specs(planned, task, stage)
    strategies: dict[int, Strategy | RegionPlan] = {
        id(eqn): selection.strategy(k, choice) for k, eqn in enumerate(selection.stage.eqns)
    }
    plan = task_plan(task, specs, strategies)
    on_host = jax_mesh is not None and jax_mesh.devices.flat[0].platform == "cpu"
    if sharding.executor != "constraint" and not on_host:
        task, plan = with_barriers(planned, task, plan)
    closed = task.closed(planned.program)
    mesh = sharding.mesh.logical
    conversions = selection.costs.conversions
    buckets = HOST_BUCKETS if on_host else None
    if sharding.executor == "constraint":
        plan = completed_plan(plan)
        program = constraint_program(closed, plan, mesh)
    else:
        program = shard_map_program(closed, plan, mesh, conversions, buckets=buckets)

    kinds = memory_kinds(planned.program, planned.tasks, jax_mesh)

    fetched = {
        k: placed(jax_mesh, partition_spec(plan.inputs[k]), "device")
        for k, name in enumerate(task.spec.inputs)
        if name in kinds and jax_mesh is not None
    }

    def run(*operands: Any) -> tuple[Any, ...]:
        values = list(operands)
        for k, sharding in fetched.items():
            values[k] = jax.device_put(values[k], sharding)
        return tuple(program(*values))

    run.__name__ = task.spec.name.replace(".", "_")
    kept = () if donate else {leaf.path for leaf in planned.program.inputs}
    donated = tuple(
        k for k, n in enumerate(task.spec.inputs) if n in task.spec.donated and n not in kept
    )
    options: dict[str, Any] = {"donate_argnums": donated}
    chosen = dict(compiler_options or {})
    if jax_mesh is not None and jax_mesh.devices.flat[0].platform == "gpu":
        chosen = {**combiner_options(mesh), **chosen}
    if on_host and any(map(is_barrier, task.eqns)):
        chosen = {**KEEPING_BARRIERS, **chosen}
    if chosen:
        options["compiler_options"] = chosen
    if jax_mesh is not None:
        options["in_shardings"] = tuple(
            placed(jax_mesh, partition_spec(spec), kinds.get(name))
            for name, spec in zip(task.spec.inputs, plan.inputs, strict=True)
        )
        options["out_shardings"] = tuple(
            placed(jax_mesh, partition_spec(spec), kinds.get(name))
            for name, spec in zip(task.spec.outputs, plan.outputs, strict=True)
        )
    function = jax.jit(run, **options)
    return CompiledTask(
        task, closed, plan, mesh, jax_mesh, conversions, function, sharding.executor, kinds
    )


def _task_specs(planned: Planned, task: Task, stage: int) -> dict[Var, ShardingSpec]:
    """Return the spec of every value at the border of a task, accumulators included.

    New state leaves the task laid out as the state it replaces.
    """
    selection = planned.selections[stage]
    choice = planned.plan.shardings[stage].solution.choice
    assert choice is not None
    value_of = {id(acc): value for value, acc in planned.tasks.accumulators.items()}
    replaced = {new: old for new, old in selection.stage.carried if old in selection.sources}
    specs: dict[Var, ShardingSpec] = {}

    def spec(var: Var) -> ShardingSpec:
        value = value_of.get(id(var), var)
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
