"""Pipeline schedules on the workers of a Ray cluster: programs, state and steps.

Programs travel as `jax.export` bytes, control as actor calls, and values between meshes over the
data plane. Arrays stay on the workers: the driver has handles of them, sends to each host its share
of the batch and to each mesh only what it reads, and gets back small outputs such as a loss.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from alpa_interchange.document import to_json
from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.boundary import check_present, complete_layouts, destinations, listing
from mesh_runtime.carry import check_outputs, with_carries
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.host_batches import HostLeaf, HostRead
from mesh_runtime.layout import HostTiles, Layout, Tiles, host_tiles, joined, plain_spec
from mesh_runtime.loaded_plan import LoadedPlan, plan_hash, value_types
from mesh_runtime.order import check_schedule, value_name
from mesh_runtime.ray_placement import RayMesh
from mesh_runtime.ray_workers import RayOptions, RayWorkers, Worker
from mesh_runtime.remote_array import Buffer, RemoteArray, StaleArrayError, fetched
from mesh_runtime.runtime import Array, Executable, ValueShardings
from mesh_runtime.task_programs import check_tasks
from mesh_runtime.trace import TRACE_MODES, TraceEvent
from mesh_runtime.transfers import Planner, TransportMaker, plan_moves
from mesh_runtime.worker_types import ArrayType, WorkerProgram, WorkerStep, own_list

Shares: TypeAlias = dict[tuple[int, int], dict[str, HostTiles]]
"""What each (mesh, host) is sent, by name."""


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
        outputs, carry = tuple(outputs), dict(carry or {})
        order = check_schedule(schedule)
        check_outputs(order, outputs, carry)
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
        placed = destinations(loaded.order, inputs, "place")
        values = {name: self._value(loaded, name, value) for name, value in inputs.items()}
        shares = self._shares(loaded, placed, values)
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
            name: self._handle(number, loaded.readers(name), self._type(loaded, name))
            for name, number in numbers.items()
        }

    def templates(self, names: Iterable[str]) -> dict[str, RemoteArray]:
        """Return handles of inputs as `place` would, of arrays that are not there: what `restore`
        is given to make them."""
        loaded = self._program()
        return {
            name: self._handle(0, loaded.readers(name), self._type(loaded, name)) for name in names
        }

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh that reads them before it writes them."""
        for name, handle in self.place(inputs).items():
            assert isinstance(handle, RemoteArray)
            self._resident[name] = handle

    def step(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Execute the schedule once on every worker; return handles of the outputs."""
        loaded = self._program()
        resident = {name: one for name, one in self._resident.items() if name not in batch}
        bound, shares, reads = self._inputs(loaded, batch, resident)
        kept = {name: self.workers.new_number() for name in self._to_keep(loaded, resident)}
        returned = [name for name in loaded.outputs if name not in kept]
        self._number += 1
        released, origin = self.workers.take_released(), time.time()

        def work_of(worker: Worker) -> WorkerStep:
            mesh = worker.mesh
            meshes = {name: self._meshes_of(loaded, name) for name in kept}
            return WorkerStep(
                plan=loaded.plan,
                number=self._number,
                bound=bound[mesh],
                placed=shares[mesh, worker.host],
                kept={name: number for name, number in kept.items() if mesh in meshes[name]},
                returned=tuple(name for name in returned if mesh == loaded.holders(name)[0]),
                reads=reads[mesh],
                released=released,
                trace=self.trace_mode,
            )

        calls = [(worker, (work_of(worker),)) for worker in self.workers.workers]
        results = self.workers.work("step", calls)
        self._note_overwritten(loaded, [*batch.items(), *resident.items()], bound)
        made = self._outputs(loaded, kept, returned, results)
        self._keep_resident(loaded, resident, made)
        self._trace = self._events(loaded, results, origin)
        return {name: made[name] for name in loaded.outputs}

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

    # ------------------------------------------------------------------ what a step reads

    def _program(self) -> LoadedPlan:
        self.workers.check_open()
        if self._loaded is None:
            raise RuntimeError("no schedule is loaded; call load() first")
        return self._loaded

    def _inputs(
        self, loaded: LoadedPlan, batch: Mapping[str, Any], resident: Mapping[str, RemoteArray]
    ) -> tuple[list[dict[str, int]], Shares, list[dict[str, HostRead]]]:
        """Return what each mesh has of a step's inputs, by number, what each host is sent, and what
        the hosts of each mesh read."""
        bound: list[dict[str, int]] = [{} for _ in loaded.order.inputs]
        reads: list[dict[str, HostRead]] = [{} for _ in loaded.order.inputs]
        moved: list[tuple[int, str]] = []
        values: dict[str, NDArray[Any]] = {}
        for mesh, name in destinations(loaded.order, batch, "step"):
            value = batch[name]
            if self._holds(mesh, value):
                bound[mesh][name] = value.buffer.number
                continue
            if isinstance(value, HostLeaf):
                reads[mesh][name] = self._read(loaded, name, value)
                continue
            moved.append((mesh, name))
            if name not in values:
                values[name] = self._value(loaded, name, value)
        for name, handle in resident.items():
            for mesh in loaded.readers(name):
                bound[mesh][name] = handle.buffer.number
        shares = self._shares(loaded, moved, values)
        for mesh, names in enumerate(loaded.order.inputs):
            check_present(mesh, names, {*bound[mesh], *shares[mesh, 0], *reads[mesh]})
        return bound, shares, reads

    def _holds(self, mesh: int, value: Any) -> bool:
        """Return whether a mesh has what a handle stands for; refuse one that is stale."""
        if not isinstance(value, RemoteArray):
            return False
        buffer = value.buffer
        if buffer.gone:
            raise StaleArrayError(f"{value!r}: {buffer.gone}")
        return buffer.owner is self.workers and buffer.value is None and mesh in buffer.meshes

    def _value(self, loaded: LoadedPlan, name: str, value: Any) -> NDArray[Any]:
        """Return an input on the host as the programs read it; refuse another shape or dtype."""
        if isinstance(value, RemoteArray):
            value = fetched([RemoteArray(value.buffer)])[0]
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{name!r} is a PRNG key array, which cannot cross processes; give "
                "jax.random.key_data of it to a program that wraps it again"
            )
        array = np.asarray(value)
        return array.astype(self._checked_dtype(loaded, name, array), copy=False)

    def _checked_dtype(self, loaded: LoadedPlan, name: str, value: Any) -> Any:
        """Return the dtype of an input as the programs read it; refuse another shape or dtype."""
        wanted, dtype = self._type(loaded, name), jax.dtypes.canonicalize_dtype(value.dtype)
        if value.shape != wanted.shape or str(dtype) != wanted.dtype:
            raise ValueError(
                f"{name!r} must be {wanted.dtype}{list(wanted.shape)}, as the programs were "
                f"exported for, got {dtype}{list(value.shape)}; nothing was run, and the state is "
                "as it was"
            )
        return dtype

    def _read(self, loaded: LoadedPlan, name: str, value: HostLeaf) -> HostRead:
        """Return what hosts are told to read for an input."""
        self._checked_dtype(loaded, name, value)
        return HostRead(self.workers.number_of(value.source), value.step, value.leaf, value.rows)

    def _type(self, loaded: LoadedPlan, name: str) -> ArrayType:
        return loaded.type_of(loaded.readers(name)[0], name)

    def _shares(
        self,
        loaded: LoadedPlan,
        placed: Iterable[tuple[int, str]],
        values: Mapping[str, NDArray[Any]],
    ) -> Shares:
        """Return, for each (mesh, host), its share of the values its mesh reads."""
        shares: Shares = {(worker.mesh, worker.host): {} for worker in self.workers.workers}
        for mesh, name in placed:
            layout = loaded.layouts[mesh][value_name(name)]
            cut = host_tiles(values[name], layout, self.workers.meshes[mesh].num_hosts)
            for host, share in enumerate(cut):
                shares[mesh, host][name] = share
        return shares

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
        for _, (given, _) in results:
            for name, parts in given.items():
                tiles.setdefault(name, []).extend(parts)
        made = {}
        for name in (*kept, *returned):
            meshes = self._meshes_of(loaded, name)
            found = loaded.type_of(meshes[0], name)
            value = None if name in kept else joined(tiles[name])
            made[name] = self._handle(kept.get(name, 0), meshes, found, value)
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
            for worker, (_, trace) in results
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
