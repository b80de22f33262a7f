"""Pipeline schedules on the workers of a Ray cluster: programs, state and steps.

Programs travel as `jax.export` bytes, control as actor calls, and values between meshes over the
data plane. Arrays stay on the workers: the driver has handles of them, sends to each host its share
of the batch and to each mesh only what it reads, and gets back small outputs such as a loss.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from alpa_interchange.document import to_json
from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.boundary import complete_layouts, destinations, listing
from mesh_runtime.carry import check_outputs, with_carries
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.layout import Layout, Tiles, plain_spec, whole_of
from mesh_runtime.loaded_plan import LoadedPlan, plan_hash, value_types
from mesh_runtime.order import check_schedule, value_name
from mesh_runtime.ray_options import RayOptions
from mesh_runtime.ray_placement import RayMesh
from mesh_runtime.ray_workers import RayWorkers, Worker
from mesh_runtime.remote_array import Buffer, RemoteArray, fetched
from mesh_runtime.runtime import Array, Executable, ValueShardings
from mesh_runtime.step_inputs import InputSorter, taken_along
from mesh_runtime.task_programs import check_tasks
from mesh_runtime.trace import TRACE_MODES, TraceEvent
from mesh_runtime.transfers import Planner, TransportMaker, plan_moves
from mesh_runtime.worker_types import ArrayType, WorkerProgram, WorkerStep, own_list


class RayRuntime:
    """Runs pipeline schedules on actors of a Ray cluster; follows `Runtime`.

    `workers` are started already, or the meshes to start some for. What steps return are handles
    (`RemoteArray`). After a failure of a worker all are closed and their state is lost: make a new
    runtime and restore from a checkpoint. Wrong arguments are refused before anything runs.

    `planner` decides how values go from mesh to mesh (`resharding.plan`), `transport` carries them
    (`resharding.HostTransport`; that of `workers` if they are started already).
    """

    def __init__(
        self,
        workers: RayWorkers | Sequence[RayMesh],
        options: RayOptions | None = None,
        *,
        planner: Planner | None = None,
        transport: TransportMaker | None = None,
        trace: str = "none",
    ) -> None:
        if trace not in TRACE_MODES:
            raise ValueError(f"trace must be one of {TRACE_MODES}, got {trace!r}")
        self._owns = not isinstance(workers, RayWorkers)
        if isinstance(workers, RayWorkers):
            self.workers = workers
        else:
            self.workers = RayWorkers(workers, options, transport=transport)
        self._planner = planner
        self.trace_mode = trace
        self._loaded: LoadedPlan | None = None
        self._resident: dict[str, RemoteArray] = {}
        self._number = 0
        self._trace: tuple[TraceEvent, ...] = ()

    @property
    def trace(self) -> tuple[TraceEvent, ...]:
        """The events of the last step by the workers' clocks; empty without a trace mode."""
        return self._trace

    def load(
        self,
        schedule: PipelineSchedule,
        executables: Mapping[str, Executable],
        shardings: ValueShardings,
        *,
        outputs: Iterable[str] = (),
        carry: Mapping[str, str] | None = None,
        joined: Mapping[str, int] | None = None,
    ) -> None:
        """Check a schedule, ship it with its exported programs and compile them there."""
        self.workers.check_open()
        for label, given in (
            ("the schedule has programs", schedule.programs),
            ("shardings", shardings),
        ):
            if len(given) != len(self.workers.meshes):
                raise ValueError(
                    f"{label} for {len(given)} meshes, but the runtime was made with "
                    f"{len(self.workers.meshes)}"
                )
        exported = _all_exported(executables)
        self._check_handed_in(schedule)
        outputs, carry, joined = tuple(outputs), dict(carry or {}), dict(joined or {})
        order = check_schedule(schedule)
        check_outputs(order, outputs, carry, joined, schedule.num_microbatches)
        check_tasks(schedule.programs, executables)
        schedule = with_carries(schedule, order, carry)
        order = check_schedule(schedule)
        layouts = tuple(
            {value: self._layout(mesh, value, spec) for value, spec in mapping.items()}
            for mesh, mapping in enumerate(complete_layouts(schedule, order, shardings, carry))
        )
        text = to_json(schedule)
        plan = plan_hash(text, exported, layouts)
        programs = [
            WorkerProgram(
                plan=plan,
                schedule=own_list(schedule, mesh),
                executables={
                    each.task: exported[each.task] for each in instructions if each.kind == "run"
                },
                layouts=layouts[mesh],
                timeout=self.workers.options.step_timeout,
            )
            for mesh, instructions in enumerate(schedule.programs)
        ]
        tasks = self.workers.load(plan, programs)
        self._unload()
        instructions = [each for program in schedule.programs for each in program]
        self._loaded = LoadedPlan(
            plan=plan,
            schedule=schedule,
            order=order,
            layouts=layouts,
            types=tuple(value_types(program, tasks) for program in schedule.programs),
            outputs=outputs,
            carry=carry,
            joined=joined,
            overwritten=frozenset(
                name
                for each in instructions
                if each.kind == "run"
                for name in each.inputs
                if value_name(name) in exported[each.task].donated
            ),
            written=frozenset(
                name for each in instructions if each.kind != "send" for name in each.outputs
            ),
        )
        if self._planner is not None:
            grids, hosts = self.workers.grids, self.workers.hosts
            moves = plan_moves(self._loaded, grids, hosts, self._planner)
            if moves:
                self.workers.route(plan, moves)

    def init(
        self, programs: Mapping[int, Executable], arguments: Sequence[Any]
    ) -> dict[int, list[Array]]:
        """Return handles of what a program makes of `arguments` on each mesh, side by side."""
        self.workers.check_open()
        exported = _all_exported({f"mesh {mesh}": made for mesh, made in programs.items()})
        values = [np.asarray(value) for value in arguments]
        numbers = {
            mesh: [self.workers.new_number() for _ in exported[f"mesh {mesh}"].out_avals]
            for mesh in programs
        }
        answers = self.workers.work(
            "init",
            [
                (worker, (exported[f"mesh {worker.mesh}"], values, numbers[worker.mesh]))
                for worker in self.workers.workers
                if worker.mesh in programs
            ],
        )
        made: dict[int, list[Array]] = {}
        for worker, types in answers:
            if worker.host == 0:
                made[worker.mesh] = [
                    self._handle(number, [worker.mesh], found)
                    for number, found in zip(numbers[worker.mesh], types, strict=True)
                ]
        return made

    def place(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Return handles of `inputs` on every mesh that reads them before it writes them."""
        loaded = self._program()
        placed, sorter = destinations(loaded.order, inputs, "place"), self._sorter()
        values = {name: sorter.value(name, value) for name, value in inputs.items()}
        shares = sorter.shares(placed, values)
        numbers = {name: self.workers.new_number() for name in values}
        self.workers.work(
            "place",
            [
                (worker, (loaded.plan, shares[worker.mesh, worker.host], numbers))
                for worker in self.workers.workers
                if shares[worker.mesh, worker.host]
            ],
        )
        return {
            name: self._handle(number, loaded.readers(name), sorter.type_of(name))
            for name, number in numbers.items()
        }

    def templates(self, names: Iterable[str]) -> dict[str, RemoteArray]:
        """Return handles of inputs as `place` would, of arrays that are not there: what `restore`
        is given to make them."""
        loaded, sorter = self._program(), self._sorter()
        return {name: self._handle(0, loaded.readers(name), sorter.type_of(name)) for name in names}

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh that reads them before it writes them."""
        for name, handle in self.place(inputs).items():
            assert isinstance(handle, RemoteArray)
            self._resident[name] = handle

    def step(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Execute the schedule once on every worker; return handles of the outputs."""
        loaded = self._program()
        resident = {name: one for name, one in self._resident.items() if name not in batch}
        inputs = self._sorter().of_step(batch, resident)
        kept = {name: self.workers.new_number() for name in self._to_keep(loaded, resident)}
        keeping: list[dict[str, int]] = [{} for _ in self.workers.meshes]
        for name, number in kept.items():
            for mesh in self._meshes_of(loaded, name):
                keeping[mesh][name] = number
        returned = [name for name in loaded.outputs if name not in kept]
        self._number += 1
        released, origin = self.workers.take_released(), time.time()
        stored = inputs.stored(self.workers)

        def work_of(worker: Worker) -> tuple[Any, ...]:
            mesh = worker.mesh
            placed, shared = taken_along(worker, inputs.shares, stored)
            step = WorkerStep(
                plan=loaded.plan,
                number=self._number,
                bound=inputs.bound[mesh],
                placed=placed,
                kept=keeping[mesh],
                returned=tuple(name for name in returned if mesh == loaded.holders(name)[0]),
                stacked={
                    name: loaded.schedule.num_microbatches
                    for name, holder in loaded.joined_on.items()
                    if mesh == holder
                },
                reads=inputs.reads[mesh],
                released=released,
                trace=self.trace_mode,
                shared=tuple(shared),
            )
            return step, *shared.values()

        calls = [(worker, work_of(worker)) for worker in self.workers.workers]
        results = self.workers.work("step", calls)
        for _, (*_, left) in results:
            if self.workers.memory is not None:
                self.workers.memory.give_back(left)
        self._note_overwritten(loaded, [*batch.items(), *resident.items()], inputs.bound)
        made = self._outputs(loaded, kept, returned, results)
        self._keep_resident(loaded, resident, made)
        self._trace = self._events(loaded, results, origin)
        return {name: made[name] for name in (*loaded.outputs, *loaded.joined)}

    def fetch(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return resident buffers as whole numpy arrays."""
        wanted = list(names)
        for name in wanted:
            if name not in self._resident:
                known = listing(sorted(self._resident))
                raise KeyError(f"no mesh holds buffer {name!r}; resident are {known}")
        return dict(zip(wanted, fetched(self._resident[name] for name in wanted), strict=True))

    def close(self) -> None:
        """Drop the program and the resident buffers; end the workers if they were started here."""
        self._resident = {}
        self._unload()
        if self._owns:
            self.workers.close()

    def _check_handed_in(self, schedule: PipelineSchedule) -> None:
        """Refuse a schedule that sends values if nothing was handed in that plans or moves them."""
        sends = any(each.kind == "send" for program in schedule.programs for each in program)
        for what, given, example in (
            ("planner", self._planner, "resharding.plan"),
            ("transport", self.workers.transport, "resharding.HostTransport"),
        ):
            if sends and given is None:
                raise ValueError(
                    f"the schedule {schedule.name!r} sends values from mesh to mesh, for which "
                    f"RayRuntime needs a {what}: give it {what}={example}"
                )

    def _unload(self) -> None:
        if self._loaded is not None and not self.workers.closed:
            self.workers.unload(self._loaded.plan)
        self._loaded = None

    def _program(self) -> LoadedPlan:
        self.workers.check_open()
        if self._loaded is None:
            raise RuntimeError("no schedule is loaded; call load() first")
        return self._loaded

    def _sorter(self) -> InputSorter:
        return InputSorter(self.workers, self._program())

    # ------------------------------------------------------------------ what a step leaves

    def _to_keep(self, loaded: LoadedPlan, resident: Iterable[str]) -> tuple[str, ...]:
        """Return the buffers that stay on the workers: also resident ones that are written anew."""
        replaced = set(loaded.carry.values())
        anew = [
            name
            for name in resident
            if name in loaded.written and name not in replaced and loaded.remains(name)
        ]
        return tuple(dict.fromkeys((*loaded.staying, *anew)))

    def _meshes_of(self, loaded: LoadedPlan, name: str) -> tuple[int, ...]:
        """Return the meshes that keep a buffer."""
        return loaded.readers(name) if name in self._resident else loaded.holders(name)

    def _note_overwritten(
        self,
        loaded: LoadedPlan,
        given: Iterable[tuple[str, Any]],
        bound: Sequence[Mapping[str, int]],
    ) -> None:
        """Mark the handles whose arrays the step was given and overwrote."""
        read = {name for names in bound for name in names}
        for name, value in given:
            if name in read and name in loaded.overwritten:
                value.buffer.gone = (
                    f"it was given away to step {self._number} as {name!r}, which overwrote it; "
                    "use what that step returned, or programs that donate nothing"
                )

    def _outputs(
        self,
        loaded: LoadedPlan,
        kept: Mapping[str, int],
        returned: Iterable[str],
        results: Iterable[tuple[Worker, Any]],
    ) -> dict[str, RemoteArray]:
        """Return handles of what a step left on the workers, and of what it sent back."""
        tiles: dict[str, Tiles] = {}
        for _, (given, *_) in results:
            for name, parts in given.items():
                tiles.setdefault(name, []).extend(parts)
        made = {}
        for name in (*kept, *returned):
            meshes = self._meshes_of(loaded, name)
            found = loaded.type_of(meshes[0], name)
            value = None if name in kept else whole_of(tiles[name])
            made[name] = self._handle(kept.get(name, 0), meshes, found, value)
        for name, dim in loaded.joined.items():
            found, stack = loaded.type_of_joined(name), whole_of(tiles[name])
            value = np.moveaxis(stack, 0, dim).reshape(found.shape)
            made[name] = self._handle(0, [loaded.joined_on[name]], found, value)
        return made

    def _keep_resident(
        self, loaded: LoadedPlan, resident: Iterable[str], made: Mapping[str, RemoteArray]
    ) -> None:
        """Replace the resident buffers by what the step left of them and what it carries back."""
        source = {target: name for name, target in loaded.carry.items()}
        kept: dict[str, RemoteArray] = {}
        for name in resident:
            if name in source:
                kept[name] = made[source[name]]
            elif name in loaded.written:
                if name in made:
                    kept[name] = made[name]
            elif loaded.remains(name) and name not in loaded.overwritten:
                kept[name] = self._resident[name]
        self._resident = kept

    def _handle(
        self,
        number: int,
        meshes: Sequence[int],
        found: ArrayType,
        value: NDArray[Any] | None = None,
    ) -> RemoteArray:
        return RemoteArray(
            Buffer(self.workers, number, meshes, found.shape, found.dtype, found.layout, value)
        )

    def _events(
        self, loaded: LoadedPlan, results: Iterable[Any], origin: float
    ) -> tuple[TraceEvent, ...]:
        events = [
            TraceEvent(
                worker.mesh,
                loaded.schedule.programs[worker.mesh][k],
                start - origin,
                stop - origin,
            )
            for worker, (_, trace, _) in results
            if worker.host == 0
            for k, start, stop in trace
        ]
        return tuple(sorted(events, key=lambda event: (event.start, event.stop)))

    def _layout(self, mesh: int, value: str, spec: NamedSharding | PartitionSpec) -> Layout:
        own, where = self.workers.meshes[mesh], f"shardings[{mesh}][{value!r}]"
        if isinstance(spec, PartitionSpec):
            return Layout(own.shape, own.axis_names, plain_spec(spec, where))
        if spec.memory_kind not in (None, "device", "unpinned_host"):
            raise ValueError(
                f"{where} is in memory {spec.memory_kind!r}; meshes on Ray keep values in the "
                "memory of their devices only"
            )
        return Layout(
            tuple(spec.mesh.axis_sizes),
            tuple(spec.mesh.axis_names),
            plain_spec(spec.spec, where),
        )


def _all_exported(executables: Mapping[str, Executable]) -> dict[str, ExportedProgram]:
    """Return the executables; TypeError names those that cannot travel."""
    callables = sorted(
        name for name, made in executables.items() if not isinstance(made, ExportedProgram)
    )
    if callables:
        raise TypeError(
            f"RayRuntime runs programs in other processes, but the executables of "
            f"{listing(callables)} are no ExportedProgram; serialise them with jax.export"
        )
    return {name: made for name, made in executables.items() if isinstance(made, ExportedProgram)}
