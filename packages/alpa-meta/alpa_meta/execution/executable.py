"""A planned step compiled for its meshes: one program per task, run by a mesh runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

import stage_dp
from alpa_interchange import Instruction, LogicalMesh, ShardingSpec
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.compat import no_mesh, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.execution.compiled_task import CompiledTask, compile_task, compile_together
from alpa_meta.execution.exported_function import as_host_array, as_keys
from alpa_meta.execution.finite import (
    VERDICT,
    Finding,
    guard_of,
    scalar_layouts,
    with_update_apart,
)
from alpa_meta.execution.host_memory import placed
from alpa_meta.execution.meshes import LocalMeshes, Meshes
from alpa_meta.execution.piecewise import parted, united
from alpa_meta.execution.ray_meshes import RayMeshes, RayPool
from alpa_meta.execution.shared_programs import with_shared_programs
from alpa_meta.identity import Identity
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.spmd import jax_sharding, partition_spec
from alpa_meta.step.arguments import abstract, strong
from alpa_meta.step.leaves import Leaf
from alpa_meta.types import Fields, Function, PyTree
from mesh_runtime import Executable as Program
from mesh_runtime import HostLeaf, RayRuntime, RemoteArray, TraceEvent, fetched

if TYPE_CHECKING:
    from alpa_meta.audit.executable import ExecutableAudit
    from alpa_meta.audit.numerics import NumericsCheck
    from alpa_meta.execution.tasks import Output


class Executable:
    """A plan compiled for devices: those of this process, or workers of `pool`.

    Call it with the flat inputs of the step. State lives on the meshes: on Ray, results are handles
    of it, which the next call takes. With `guarded`, a step whose microbatches are not all finite
    gives its state back as it was, and `finding` says which microbatch that was.
    """

    def __init__(
        self,
        planned: Planned,
        devices: Sequence[jax.Device] | None = None,
        trace: str = "none",
        donate: bool = True,
        pool: RayPool | None = None,
        guarded: bool = False,
    ):
        if guarded:
            planned = with_update_apart(planned)
        self.planned = planned
        self.plan = planned.plan
        self._remote = pool is not None
        self._compiled = False
        self._places: Meshes = (
            LocalMeshes(self.plan, devices, trace)
            if pool is None
            else RayMeshes(self.plan, pool, trace)
        )
        self.stage_meshes = self._places.stages
        self.schedule = stage_dp.instruction_lists(self.plan)
        self.finding: Finding | None = None
        self._guard = guard_of(planned, self.schedule) if guarded else None
        if self._guard is not None:
            self.schedule = self._guard.schedule
        self.meshes = self.stage_meshes[: self.plan.stage_plan.num_meshes]
        tasks = {
            task.spec.name: compile_task(
                planned,
                task,
                self.stage_meshes[task.spec.stage],
                donate and (self._guard is None or task.spec.phase == "update"),
                platform=self._places.platform(task.spec.stage),
            )
            for task in planned.tasks.tasks
        }
        if planned.program.slices is not None:
            tasks = with_shared_programs(tasks)
        self.tasks = {name: self._guarded(task) for name, task in tasks.items()}
        self._runtime = self._places.runtime
        graph, carry = self.planned.tasks.graph, self.planned.tasks.carry
        read = set(graph.inputs)
        with no_mesh():
            held = self._held()
            names, joined = self.planned.tasks.output_names()
            self._contract: Fields = {
                "executables": {
                    **{
                        name: self._places.task(task, held[task.task.spec.mesh])
                        for name, task in self.tasks.items()
                    },
                    **self._reductions(),
                },
                "shardings": self._shardings(),
                "outputs": names if self._guard is None else [*names, VERDICT],
                "joined": joined,
                "carry": {name: carry[name] for name in names if carry.get(name) in read},
            }
            self._runtime.load(self.schedule, **self._contract)
        self._homes = dict(zip(graph.inputs, graph.home, strict=True))
        self._where = self._input_places()
        self._statistics = self._compiled_statistics()

    # ------------------------------------------------------------------ running

    @functools.cached_property
    def only_run(self) -> Instruction | None:
        """The one instruction of a plan that runs one task once in this process; None for other
        plans."""
        if self._remote or self._guard is not None:
            return None
        runs = [i for program in self.schedule.programs for i in program if i.kind != "free"]
        return runs[0] if len(runs) == 1 and runs[0].kind == "run" else None

    def __call__(
        self, inputs: Sequence[PyTree], computed: Sequence[bool] | None = None
    ) -> list[PyTree]:
        """Return the array leaves of the step's result for those of its arguments, in order.

        Outputs that are not `computed` are None (by default all are).
        """
        with no_mesh():
            return self._run(inputs, computed)

    def prepare(self) -> None:
        """Compile all tasks, if that is not done; else the first call does. Workers on Ray have."""
        if not self._compiled and not self._remote:
            compile_together(self.tasks.values())
        self._compiled = True

    def _run(self, inputs: Sequence[PyTree], computed: Sequence[bool] | None) -> list[PyTree]:
        if not self._remote:
            inputs = [np.asarray(one) if isinstance(one, HostLeaf) else one for one in inputs]
        if len(self.tasks) > 1:
            self.prepare()
        inputs = parted(self.planned.program, [*inputs, *self._given(inputs)])
        buffers: dict[str, PyTree] = {}
        placed = list(inputs)
        seen: set[Identity] = set()
        strangers: dict[str, int] = {}
        for k, leaf in enumerate(self.planned.program.inputs):
            if leaf.path not in self._where:
                continue
            if leaf.in_parts:
                buffers[leaf.path] = self._batch(leaf, inputs[k])
                continue
            buffers[leaf.path] = placed[k] = self._placed(leaf, inputs[k], seen)
            if leaf.role == "state" and not isinstance(placed[k], (jax.Array, RemoteArray)):
                strangers[leaf.path] = k
        if strangers:
            for path, value in self._runtime.place({p: buffers[p] for p in strangers}).items():
                buffers[path] = placed[strangers[path]] = value
        results = self._runtime.step(buffers)
        outputs = [self._output(output, results, placed) for output in self.planned.tasks.outputs]
        if self._guard is not None:
            self.finding = self._guard.finding(int(results[VERDICT]))
            if self.finding is not None:
                self._keep_state(outputs, placed)
        if self._remote:
            outputs = self._with_keys(outputs)
        if computed is not None:
            outputs = [one if there else None for one, there in zip(outputs, computed, strict=True)]
        return united(self.planned.program, outputs)

    def _keep_state(self, outputs: list[PyTree], inputs: Sequence[PyTree]) -> None:
        """Put the old state in the place of what was not made by an update that kept it."""
        assert self._guard is not None
        kept = {
            task.spec.outputs[result]
            for task in self.planned.tasks.tasks
            for result, _ in self._guard.updates.get(task.spec.name, ())
        }
        aliases = self.planned.program.aliases
        for k, (output, alias) in enumerate(zip(self.planned.tasks.outputs, aliases, strict=True)):
            if alias is not None and output.name not in kept:
                outputs[k] = inputs[alias]

    def _guarded(self, task: CompiledTask) -> CompiledTask:
        return task if self._guard is None else self._guard.compiled(task)

    def _reductions(self) -> dict[str, Program]:
        """Return the programs that find the first run that is not finite."""
        if self._guard is None:
            return {}
        num_runs = len(self._guard.runs)
        return {
            name: self._places.function(
                one.function(num_runs),
                one.arguments,
                None,
                [NamedSharding(self.meshes[one.mesh], PartitionSpec())],
                one.mesh,
            )
            for name, one in self._guard.reductions.items()
        }

    def _given(self, inputs: Sequence[PyTree]) -> list[PyTree]:
        """Return what every microbatch is given beside the step's inputs, in their order; None for
        the totals, which the step adds up itself.
        """
        statistics = iter(self._statistics(inputs))
        numbers = np.arange(self.plan.num_microbatches, dtype=np.int32)
        values: dict[str, Callable[[], PyTree]] = {
            "number": lambda: numbers,
            "statistic": lambda: next(statistics),
            "part": lambda: next(statistics),
            "total": lambda: None,
        }
        given = self.planned.program.inputs
        return [values[leaf.role]() for leaf in given if leaf.role in values]

    def _compiled_statistics(self) -> Callable[[Sequence[PyTree]], Sequence[PyTree]]:
        """Return the program of the statistics of the whole batch, on the devices of the first
        stage: partitioned by XLA along the batch.
        """
        statistics = self.planned.program.statistics
        if statistics is None:
            return lambda _: ()
        mesh = self.meshes[0]
        whole = NamedSharding(mesh, PartitionSpec())
        along = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        variables = statistics.closed.jaxpr.invars
        places = [
            along if is_batch and shape_of(var)[0] % mesh.size == 0 else whole
            for var, is_batch in zip(variables, statistics.of_batch, strict=True)
        ]
        program = self._places.function(
            jaxpr_as_fun(statistics.closed),
            [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables],
            places,
            [whole] * len(statistics.closed.jaxpr.outvars),
            0,
        )

        def compute(inputs: Sequence[PyTree]) -> Sequence[PyTree]:
            read = [inputs[k] for k in statistics.inputs]
            if not self._remote:
                return self._runtime.init({0: program}, read)[0]
            made = self._runtime.init({0: program}, list(map(as_host_array, read)))[0]
            return fetched(one for one in made if isinstance(one, RemoteArray))

        return compute

    def init(
        self,
        functions: Mapping[int, Function[Sequence[jax.Array]]],
        shardings: Mapping[int, Sequence[NamedSharding]],
        args: tuple[PyTree, ...],
    ) -> dict[int, list[PyTree]]:
        """Return what each mesh makes of `args`, laid out by its shardings."""
        leaves: list[PyTree]
        tree: PyTreeDef
        leaves, tree = jax.tree.flatten(args)
        shapes = list(map(abstract, leaves))
        made_shapes: dict[int, list[jax.ShapeDtypeStruct]] = {}

        def of_leaves(mesh: int) -> Function[Sequence[jax.Array]]:
            def run(*given: jax.Array) -> Sequence[jax.Array]:
                made = functions[mesh](*tree.unflatten(given))
                made_shapes[mesh] = [abstract(one) for one in made]
                return made

            return run

        with no_mesh():
            programs = {
                mesh: self._places.function(of_leaves(mesh), shapes, None, shardings[mesh], mesh)
                for mesh in functions
            }
            if not self._remote:
                return self._runtime.init(programs, leaves)
            made = self._runtime.init(programs, list(map(as_host_array, leaves)))
        return {
            mesh: [as_keys(one, like) for one, like in zip(arrays, made_shapes[mesh], strict=True)]
            for mesh, arrays in made.items()
        }

    def place(self, inputs: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Return inputs, by path, where the step reads them; others as they are."""
        read = {path: value for path, value in inputs.items() if path in self._where}
        if self._remote:
            read = {path: as_host_array(value) for path, value in read.items()}
        with no_mesh():
            found = {**inputs, **self._runtime.place(read)}
        return {path: as_keys(value, inputs[path]) for path, value in found.items()}

    def reload(self, pool: RayPool) -> None:
        """Load the same programs on the workers that a pool has now, in the place of some that
        failed."""
        self._places = RayMeshes(self.plan, pool, self._runtime.trace_mode)
        self._runtime = self._places.runtime
        self._runtime.load(self.schedule, **self._contract)

    def templates(self) -> dict[str, PyTree]:
        """Return, for each input of the plan that is no batch, by path, what stands for an array
        laid out as it is read: on Ray a handle of one that is not there, else a shape. Of what the
        step never reads, a shape without a layout."""
        held = [leaf for leaf in self.planned.program.inputs if leaf.role in ("state", "constant")]
        if not isinstance(self._runtime, RayRuntime):
            return {
                leaf.path: jax.ShapeDtypeStruct(
                    leaf.aval.shape, leaf.aval.dtype, sharding=self._where.get(leaf.path)
                )
                for leaf in held
            }
        found = self._runtime.templates([one.path for one in held if one.path in self._where])
        return {
            leaf.path: as_keys(found[leaf.path], leaf.aval) if leaf.path in found else leaf.aval
            for leaf in held
        }

    def _with_keys(self, outputs: Sequence[PyTree]) -> list[PyTree]:
        avals = [atom.aval for atom in self.planned.program.jaxpr.outvars]
        return [as_keys(value, aval) for value, aval in zip(outputs, avals, strict=True)]

    def _placed(self, leaf: Leaf, value: PyTree, seen: set[Identity]) -> PyTree:
        """Return an input on its devices; one array given for two inputs is copied, as the step may
        overwrite each. `seen` are the arrays met so far.
        """
        path = leaf.path
        self._check_type(leaf, value)
        if isinstance(value, (jax.Array, RemoteArray)):
            if value.is_deleted():
                raise PlanError(
                    f"{path} was given away to an earlier step, which overwrote it; pass the state "
                    "that step returned, or keep old states with Options(donate=False)"
                )
            identity = Identity(value.buffer if isinstance(value, RemoteArray) else value)
            if identity in seen:
                value = value.fetch() if isinstance(value, RemoteArray) else jnp.copy(value)
            seen.add(identity)
        if self._remote:
            return value if isinstance(value, RemoteArray) else as_host_array(value)
        sharding = self._where[path]
        if leaf.role != "batch":
            value = strong(value, leaf.aval.dtype)
        if isinstance(value, jax.Array) and value.sharding == sharding:
            return value
        return jax.device_put(value, sharding)

    def _check_type(self, leaf: Leaf, value: PyTree) -> None:
        """Refuse an array of another shape than the plan's, before anything runs."""
        if np.shape(value) != leaf.aval.shape:
            raise PlanError(
                f"{leaf.path} must have shape {leaf.aval.shape}, as planned, got "
                f"{np.shape(value)}; nothing was run, and the state is as it was"
            )

    def _batch(self, leaf: Leaf, value: PyTree) -> PyTree:
        """Return a leaf of the batch, which the runtime deals out to the microbatches."""
        path, size = leaf.path, leaf.aval.shape[0]
        if np.shape(value)[0] != size:
            raise PlanError(
                f"{path} has {np.shape(value)[0]} examples, the plan is for batches of {size}; "
                "plan again for the new batch size"
            )
        self._check_type(leaf, value)
        if self._remote and not isinstance(value, HostLeaf):
            return as_host_array(value)
        return value

    def _output(
        self, output: Output, results: Mapping[str, PyTree], inputs: Sequence[PyTree]
    ) -> PyTree:
        if output.name is None:
            value = output.constant if output.input is None else inputs[output.input]
            from_host = output.input is None or isinstance(value, np.ndarray) and not self._remote
            return jnp.asarray(value) if from_host else value
        return results[output.name] if output.name in results else results[f"{output.name}@0"]

    # ------------------------------------------------------------------ where values live

    def _held(self) -> list[dict[str, NamedSharding]]:
        """Return the layouts in which the tasks of each mesh find their operands.

        Where stages share a mesh, a value is as the stage that makes it lays it out.
        """
        held = self._shardings()
        if len(self.meshes) == len(self.stage_meshes):
            return held
        for compiled in self.tasks.values():
            spec, stage = compiled.task.spec, self.stage_meshes[compiled.task.spec.stage]
            for name, found in zip(spec.outputs, compiled.plan.outputs, strict=True):
                if name not in spec.inputs:
                    kind = compiled.kinds.get(name)
                    held[spec.mesh][name] = placed(stage, partition_spec(found), kind)
        return held

    def _shardings(self) -> list[dict[str, NamedSharding]]:
        shardings: list[dict[str, NamedSharding]] = [{} for _ in self.meshes]
        if self._guard is not None:
            shardings = scalar_layouts(self._guard, self.meshes)
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
                shardings[home][name] = jax_sharding(spec, self.meshes[home])
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

    def input_mesh(self, path: str) -> int:
        """Return the number of the mesh an input lives on; the first, if the step never reads
        it."""
        return self._homes.get(path, 0)

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
        return {name: task.compiled.as_text() or "" for name, task in self.tasks.items()}

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

        if self._guard is not None:
            raise PlanError(
                "an audit is of the plan's own programs, and on_nan adds to them; make the step "
                "without on_nan to audit its plan"
            )
        if self._remote:
            raise PlanError(
                "an audit compiles the plan for devices of this process; make it with "
                "runtime='in-process'"
            )
        platform = self.meshes[0].devices.flat[0].platform
        backend = "cpu" if platform == "cpu" else "cuda"
        return audit_tasks(self, self.tasks, self.planned, backend=backend, numerics=numerics)

    def close(self) -> None:
        """Drop the runtime's buffers."""
        self._runtime.close()
