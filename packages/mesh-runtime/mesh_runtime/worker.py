"""One host of one mesh: holds its devices' shards and executes the mesh's instruction list.

All hosts of a mesh run the same list on the same programs, as one multi-process JAX computation;
values for other meshes go out through the transport, by the plans that came with the program. All
receives are posted when a step begins, as far as the transport has room; a receive instruction only
marks its buffers, which are waited for when first used, so an early receive delays nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_interchange.document import from_json
from alpa_interchange.reshard import ReshardingPlan
from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime.array_store import ArrayReader, ArrayWriter, FileSums, Part, StoreError
from mesh_runtime.carry import parts_of
from mesh_runtime.device_memory import memory_of
from mesh_runtime.driver_memory import MappedMemory, MappedShare, Place
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.gpu_plane import GpuPair, GpuPlane, GpuTransport, GpuTransportMaker
from mesh_runtime.heartbeats import Doing
from mesh_runtime.host_batches import HostRead, ReadRows, RowReader
from mesh_runtime.layout import HostTiles, Layout, Tiles, array_of
from mesh_runtime.order import describe, value_name
from mesh_runtime.pacing import Pace
from mesh_runtime.pieces import box_of
from mesh_runtime.running_step import Arriving, Departing, Loaded, RunningStep
from mesh_runtime.runtime import StepError
from mesh_runtime.task_programs import (
    LoadedProgram,
    call,
    task_programs,
)
from mesh_runtime.trace import Recorder
from mesh_runtime.transfers import (
    Moves,
    Receiving,
    Sending,
    Transport,
    device_number,
    device_owners,
)
from mesh_runtime.worker_mesh import WorkerMesh, worker_name
from mesh_runtime.worker_types import (
    ArrayType,
    TaskTypes,
    WorkerProgram,
    WorkerStep,
    layout_of,
    types_of,
)

_SAVED = 8  # folders written of which the answer is kept, as it may be asked for again


class MeshWorker:
    """Host `host` of mesh `mesh`; `devices` are all devices of the mesh, host by host."""

    def __init__(
        self,
        mesh: int,
        host: int,
        meshes: Sequence[WorkerMesh],
        transport: Transport | None = None,
        devices: Sequence[Any] | None = None,
        gpu_transport: GpuTransportMaker | None = None,
    ) -> None:
        self.mesh, self.host, self.meshes = mesh, host, tuple(meshes)
        self.transport = transport
        own = self.meshes[mesh]
        chosen = list(jax.devices() if devices is None else devices)
        wanted = int(np.prod(own.shape))
        if len(chosen) != wanted:
            raise ValueError(
                f"{self.name}: the mesh of shape {own.shape} needs {wanted} devices on "
                f"{own.num_hosts} hosts, but jax sees {len(chosen)}"
            )
        self.devices = chosen
        self._grid = Layout(own.shape, own.axis_names)
        self.jax_mesh = self._grid.mesh(chosen)
        self._number_of = {
            device: device_number(self.meshes, mesh, k) for k, device in enumerate(chosen)
        }
        here = {
            number: device
            for device, number in self._number_of.items()
            if device.process_index == jax.process_index()
        }
        self.gpus = GpuPlane(self.name, gpu_transport, here)
        self._pace = Pace(self.jax_mesh)
        self.doing = Doing(mesh, host)
        self.most_held = 0  # buffers at a time, in the last step
        self._arrays: dict[int, jax.Array] = {}
        self._saving: dict[str, Future[FileSums]] = {}
        self._loaded: dict[str, Loaded] = {}
        self._made: dict[ExportedProgram, LoadedProgram] = {}
        self._shardings: dict[Layout, NamedSharding] = {}
        self._readers: dict[int, RowReader] = {}
        self._mapped = MappedMemory()

    @property
    def name(self) -> str:
        return worker_name(self.mesh, self.host)

    def load(self, program: WorkerProgram) -> TaskTypes:
        """Install a program and compile its tasks; return the inputs and outputs of each exported
        one."""
        schedule = from_json(program.schedule, PipelineSchedule, source="the schedule")
        (instructions,) = schedule.programs
        tasks = task_programs(instructions, program.executables, self.jax_mesh)
        types: TaskTypes = {}
        for name, task in tasks.items():
            if not isinstance(task, LoadedProgram):
                continue
            try:
                types[name] = types_of(task, self._grid)
            except Exception as error:
                raise StepError(f"task {name!r} cannot be compiled: {error}") from error
        self._loaded[program.plan] = Loaded(program, instructions, tasks)
        return types

    def memory(self) -> tuple[float | None, str]:
        """Return the bytes that jax may take of each device here, if it says, and what they are."""
        local = self.jax_mesh.local_devices
        return memory_of(list(local)), str(local[0].device_kind)

    def gpu_obstacle(self) -> str:
        """Return why values cannot go from GPU to GPU here; "" if they can."""
        return self.gpus.obstacle()

    def gpu_identities(self, count: int) -> list[bytes]:
        """Return what the workers of `count` new pairs of meshes know each other by."""
        return self.gpus.identities(count)

    def reaches(self, place: Place, token: bytes) -> bool:
        """Return whether files in the memory of the driver can be mapped here."""
        return self._mapped.reaches(place, token)

    def route(self, plan: str, moves: Moves, pairs: Sequence[GpuPair] = ()) -> None:
        """Learn by which plans the values of a program come to this mesh and go from it, and meet
        the workers of new `pairs` of meshes between which they go from GPU to GPU."""
        if pairs:
            timeout = self._program(plan).program.timeout
            self.gpus.connect(pairs, device_owners(self.meshes), timeout)
        self._program(plan).moves = dict(moves)

    def unload(self, plan: str) -> None:
        """Drop a program."""
        self._loaded.pop(plan, None)

    def add_batches(
        self, number: int, read: ReadRows, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> None:
        """Learn how the rows of batches are read that steps will name by a number."""
        self._readers[number] = RowReader(read, shapes)

    def place(self, plan: str, inputs: Mapping[str, HostTiles], numbers: Mapping[str, int]) -> None:
        """Keep this host's share of arrays, in the layouts of a program, under numbers."""
        loaded = self._program(plan)
        for name, share in inputs.items():
            self._arrays[numbers[name]] = self._place(loaded, name, share)

    def init(
        self, program: ExportedProgram, arguments: Sequence[Any], numbers: Sequence[int]
    ) -> list[ArrayType]:
        """Keep what a program makes of whole arrays, under numbers; return what they are."""
        if program not in self._made:
            self._made[program] = LoadedProgram(self.name, program, self.jax_mesh, len(arguments))
        made = self._made[program]
        results = made(*made.placed(arguments))
        self._arrays.update(zip(numbers, results, strict=True))
        return types_of(made, self._grid)[1]

    def step(
        self, step: WorkerStep, *shared: HostTiles
    ) -> tuple[dict[str, Tiles], list[tuple[int, float, float]], tuple[int, ...]]:
        """Execute a program once; return this host's tiles of what is returned, the trace, and the
        numbers of the driver's files that were let go.

        The trace holds (position, start, stop) in seconds since the epoch.
        """
        loaded = self._program(step.plan)
        self.release(step.released)
        recorder, origin = Recorder(step.trace, self.mesh + 1), time.time()
        self.most_held = 0
        state = RunningStep(loaded, step.number, recorder)
        state.held = {name: self._array(number) for name, number in step.bound.items()}
        given = (*step.placed.items(), *zip(step.shared, shared, strict=True))
        for name, share in (*given, *self._read(loaded, step.reads)):
            found = self._mapped.tiles(share) if isinstance(share, MappedShare) else share
            state.held.update(found.parts(name))
        try:
            self._post_receives(state)
            for position, instruction in enumerate(loaded.instructions):
                self._execute(state, position, instruction)
            outputs = {
                name: self._tiles_to_return(self._value(state, name)) for name in step.returned
            }
            for name, count in step.stacked.items():
                parts = [self._value(state, part) for part in parts_of(name, count)]
                outputs[name] = _stacked([self._tiles_to_return(part) for part in parts])
            kept = {number: self._value(state, name) for name, number in step.kept.items()}
            for each in state.sending:
                self._result(state, each.position, each.sending)
            jax.block_until_ready(list(kept.values()))  # a step that returns was done
            self.release([k for k in step.bound.values() if self._arrays[k].is_deleted()])
            self._arrays.update(kept)
        except Exception as error:
            raise state.issued.failure() or error from error
        finally:
            self.doing.nothing()
            for left in state.arriving.values():
                left.receiving.cancel()
            timings = recorder.finish()
        trace = [(one.position, origin + one.start, origin + one.stop) for one in timings]
        return outputs, trace, self._mapped.take_left()

    def fetch(self, numbers: Sequence[int]) -> dict[int, Tiles]:
        """Return this host's tiles of arrays."""
        return {number: self._tiles_to_return(self._array(number)) for number in numbers}

    def save(self, folder: str, parts: Sequence[tuple[int, Part]], host_bytes: int) -> None:
        """Start to write this host's tiles of arrays into a folder; `saved` tells when that is
        done. Returns when steps may overwrite the arrays."""
        pool, held = ThreadPoolExecutor(1), [(part, self._array(k)) for k, part in parts]
        for earlier in [one for one, future in self._saving.items() if future.done()][:-_SAVED]:
            del self._saving[earlier]
        try:
            writer = ArrayWriter(Path(folder), self.name.replace(" ", "_"), host_bytes)
            writer.write(held)
            self._saving[folder] = pool.submit(writer.finish)
        except (ModuleNotFoundError, StoreError) as error:
            self._saving[folder] = Future()
            self._saving[folder].set_exception(error)
        pool.shutdown(wait=False)

    def saved(self, folder: str) -> FileSums | str | None:
        """Return the files written into a folder, or why they could not be; None: not yet."""
        future = self._saving[folder]
        if not future.done():
            return None
        error = future.exception()
        return future.result() if error is None else f"{self.name}: {error}"

    def restore(
        self, folder: str, parts: Sequence[tuple[int, Part, Layout]], host_bytes: int
    ) -> str | None:
        """Keep this host's tiles of arrays of a folder, under numbers; return why not, if not."""
        wanted = [(part, self._sharding(layout)) for _, part, layout in parts]
        try:
            made = ArrayReader(Path(folder)).sharded(wanted, host_bytes)
        except (ModuleNotFoundError, StoreError) as error:
            return f"{self.name}: {error}"
        self._arrays.update(zip((number for number, *_ in parts), made, strict=True))
        return None

    def release(self, numbers: Iterable[int]) -> None:
        """Drop arrays."""
        for number in numbers:
            self._arrays.pop(number, None)

    def close(self) -> None:
        """Drop all arrays and close the transport."""
        self._arrays.clear()
        self.gpus.close()
        if self.transport is not None:
            self.transport.close()

    def _program(self, plan: str) -> Loaded:
        if plan not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise StepError(
                f"{self.name} is asked for the plan {plan}, but has loaded {known}; load the same "
                "plan on all workers"
            )
        return self._loaded[plan]

    def _array(self, number: int) -> jax.Array:
        if number not in self._arrays:
            raise StepError(f"{self.name} holds no array number {number}")
        return self._arrays[number]

    def _read(
        self, loaded: Loaded, reads: Mapping[str, HostRead]
    ) -> Iterator[tuple[str, HostTiles]]:
        """Yield what this host reads of its batch, by name."""
        sources: dict[int, dict[str, HostRead]] = {}
        for whole, each in reads.items():
            sources.setdefault(each.source, {}).update(each.parts(whole))
        for source, named in sources.items():
            reader = self._readers[source]
            boxes = {}
            for name, each in named.items():
                shape = reader.shape(each)
                layout = loaded.program.layouts[value_name(name)]
                found = self._sharding(layout).addressable_devices_indices_map(shape)
                boxes[name] = [box_of(index or (), shape) for index in found.values()]
            try:
                yield from reader.shares(named, boxes).items()
            except Exception as error:
                raise StepError(f"{self.name} could not read its batch: {error}") from error

    def _sharding(self, layout: Layout) -> NamedSharding:
        if layout not in self._shardings:
            self._shardings[layout] = layout.sharding(self.devices)
        return self._shardings[layout]

    def _place(self, loaded: Loaded, name: str, share: HostTiles) -> jax.Array:
        sharding = self._sharding(loaded.program.layouts[value_name(name)])
        return array_of(share.shape, sharding, dict(share.tiles))

    def _execute(self, state: RunningStep, position: int, instruction: Instruction) -> None:
        recorder = state.recorder
        start = recorder.now()
        self.doing.at(state.number, position, instruction)
        written: Sequence[jax.Array] = ()
        if instruction.kind == "run":
            read = [self._value(state, name) for name in instruction.inputs]
            start = recorder.now()
            program = state.loaded.program.executables[instruction.task]
            donated = program.donated if isinstance(program, ExportedProgram) else ()
            for name in instruction.inputs:
                if value_name(name) in donated:
                    self._await_sends(state, name)
            written = call(state.loaded.tasks, self.mesh, position, instruction, read)
            state.issued.add(self.mesh, position, instruction, written)
            state.held.update(zip(instruction.outputs, written, strict=True))
        elif instruction.kind == "send":
            for name in instruction.inputs:
                self._send(state, position, name, self._value(state, name))
        elif instruction.kind == "receive":
            for name in instruction.outputs:
                state.held[name] = state.arriving[position, name]
            self.most_held = max(self.most_held, len(state.held))
            return
        else:
            for name in instruction.inputs:
                arriving = state.held.pop(name)
                if isinstance(arriving, Arriving):
                    self._receive(state, name, arriving)
        self.most_held = max(self.most_held, len(state.held))
        if recorder.mode != "none":
            recorder.record(self.mesh, position, instruction.kind, start, (), written)
        if instruction.kind == "run":
            self._pace.issued(written)

    def _value(self, state: RunningStep, name: str) -> jax.Array:
        """Return a buffer, waiting for it if it has just been received; what came with the step is
        placed when it is first read, so that the first run does not wait for the last input."""
        value = state.held[name]
        if isinstance(value, Arriving):
            value = state.held[name] = self._receive(state, name, value)
        elif isinstance(value, HostTiles):
            value = state.held[name] = self._place(state.loaded, name, value)
        found: jax.Array = value
        return found

    def _await_sends(self, state: RunningStep, name: str) -> None:
        """Wait until the transport has a buffer that is about to be overwritten."""
        for each in state.sending:
            if each.name == name:
                self._waited(state, each.position, each.sending.taken)

    def _result(self, state: RunningStep, position: int, transfer: Sending | Receiving) -> Any:
        """Return what a transfer ends with, noting that it is waited for."""
        with self.doing.waiting(position, state.loaded.instructions[position], transfer):
            return self._waited(state, position, transfer.result)

    def _waited(self, state: RunningStep, position: int, wait: Callable[[float], Any]) -> Any:
        """Return what the transport is waited for; its errors name the instruction."""
        try:
            return wait(state.loaded.program.timeout)
        except Exception as error:
            where = describe(self.mesh, position, state.loaded.instructions[position])
            raise StepError(f"{where} on host {self.host} failed: {error}") from error

    def _key(self, state: RunningStep, source: int, target: int, count: int, name: str) -> str:
        return f"step {state.number}: {name} from mesh {source} to mesh {target}, message {count}"

    def _post_receives(self, state: RunningStep) -> None:
        counts: Counter[int] = Counter()
        program = state.loaded.program
        for position, instruction in enumerate(state.loaded.instructions):
            if instruction.kind != "receive" or instruction.peer is None:
                continue
            for name in instruction.outputs:
                peer = instruction.peer
                key = self._key(state, peer, self.mesh, counts[peer], name)
                counts[peer] += 1
                move = self._move(state, name, peer, self.mesh)
                receiving = self._transport().receive(key, move, program.plan)
                self.doing.receives(key, receiving)
                state.arriving[position, name] = Arriving(receiving, peer, position)

    def _send(self, state: RunningStep, position: int, name: str, array: jax.Array) -> None:
        """Hand this host's tiles of `array` to the transport."""
        peer = state.loaded.instructions[position].peer
        assert peer is not None
        count = state.sent.get(peer, 0)
        state.sent[peer] = count + 1
        move = self._move(state, name, self.mesh, peer)
        array = self._as_planned(array, move)
        tiles = {self._number_of[shard.device]: shard.data for shard in array.addressable_shards}
        # Elsewhere than on GPUs whoever touches what failed, instead of waiting for it, aborts.
        ready = (lambda: tiles) if self.gpus.transport else lambda: _computed(tiles)
        key = self._key(state, self.mesh, peer, count, name)
        sending = self._transport().send(key, move, ready, state.loaded.program.plan)
        self.doing.sent(key, sending)
        state.sending.append(Departing(name, position, sending))

    def _move(self, state: RunningStep, name: str, source: int, target: int) -> ReshardingPlan:
        found = state.loaded.moves.get((value_name(name), source, target))
        if found is None:
            raise StepError(
                f"{self.name} has no plan to move {name!r} from mesh {source} to mesh {target}; an "
                "array of random keys has none: send jax.random.key_data of it and wrap it again"
            )
        return found

    def _transport(self) -> Transport | GpuTransport:
        if self.gpus.transport is not None:
            return self.gpus.transport
        if self.transport is None:
            raise StepError(f"{self.name} has no transport to other meshes")
        return self.transport

    def _as_planned(self, array: jax.Array, move: ReshardingPlan) -> jax.Array:
        """Return `array` in the layout the plan was made for: XLA may have chosen another."""
        layout = layout_of(move.task.source)
        wanted = self._sharding(layout)
        if array.sharding.is_equivalent_to(wanted, array.ndim):
            return array
        moved: jax.Array = jax.jit(lambda one: one, out_shardings=wanted)(array)
        return moved

    def _receive(self, state: RunningStep, name: str, arriving: Arriving) -> jax.Array:
        """Return an array put together from the tiles that arrived; the trace has the waiting."""
        start = state.recorder.now()
        tiles = self._result(state, arriving.position, arriving.receiving)
        tensor = self._move(state, name, arriving.peer, self.mesh).task.tensor
        dtype = jax.numpy.dtype(tensor.dtype)
        sharding = self._sharding(state.loaded.program.layouts[value_name(name)])
        shape = sharding.shard_shape(tensor.shape)
        own = sharding.addressable_devices_indices_map(tensor.shape)
        parts = {device: tiles[self._number_of[device]] for device in own}
        if self.gpus.transport:
            shards = [jax.device_put(tile, device) for device, tile in parts.items()]
            made: jax.Array = jax.make_array_from_single_device_arrays(
                tensor.shape, sharding, shards
            )
        else:
            boxes = {box_of(own[one] or (), tensor.shape): tile for one, tile in parts.items()}
            views = {box: tile.view(dtype).reshape(shape) for box, tile in boxes.items()}
            made = array_of(tensor.shape, sharding, views)
        if state.recorder.mode != "none":
            at = arriving.position
            state.recorder.record(self.mesh, at, "receive", start, (), [made])
        return made

    def _tiles_to_return(self, array: jax.Array) -> Tiles:
        """Return the tiles of which this host has the first replica; all hosts together: all."""
        return [
            (box_of(shard.index, array.shape), np.asarray(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]


def _stacked(parts: Sequence[Tiles]) -> Tiles:
    """Return the tiles of arrays laid out alike with a first dim that counts the arrays."""
    return [
        (((0, len(parts)), *of_box[0][0]), np.stack([tile for _, tile in of_box]))
        for of_box in zip(*parts, strict=True)
    ]


def _computed(tiles: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return tiles when they are there."""
    for tile in tiles.values():
        tile.block_until_ready()
    return tiles
