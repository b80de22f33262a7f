"""One host of one mesh: holds its devices' shards and executes the mesh's instruction list.

All hosts of a mesh run the same list on the same programs, as one multi-process JAX computation;
values for other meshes go out through the data plane, piece by piece (`pieces`). A receive only
marks its buffers: they are taken from the inbox when first used, so an early receive delays
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from attrs import define, field, frozen
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from alpa_interchange.document import from_json
from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime.boundary import check_present
from mesh_runtime.data_plane import Content, DataPlaneError, Plane
from mesh_runtime.order import describe, value_name
from mesh_runtime.pacing import Pace
from mesh_runtime.pieces import (
    Box,
    assemble,
    assign_pieces,
    box_of,
    device_boxes,
    pack,
    unpack,
)
from mesh_runtime.runtime import StepError
from mesh_runtime.task_programs import TaskProgram, call, task_programs
from mesh_runtime.trace import Recorder

Spec = tuple[None | str | tuple[str, ...], ...]  # entries of a PartitionSpec


@frozen(kw_only=True)
class WorkerMesh:
    """A mesh as workers see it: its grid, and the processes its devices are spread over."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_hosts: int

    def host_boxes(self, shape: Sequence[int], spec: Spec) -> list[tuple[int, Box]]:
        """Return (host, tile) of every device for a value of `shape` laid out by `spec`."""
        boxes = device_boxes(shape, spec, self.shape, self.axis_names)
        per_host = len(boxes) // self.num_hosts
        return [(position // per_host, box) for position, box in enumerate(boxes)]


@frozen(kw_only=True)
class WorkerProgram:
    """What a worker gets at load, all of it plain data."""

    schedule: str  # JSON of a PipelineSchedule
    executables: Mapping[str, bytes]
    specs: tuple[Mapping[str, Spec], ...]  # per mesh, by value
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # those this mesh hands back
    carry: Mapping[str, str]  # those both of whose ends are on this mesh
    donated: Mapping[str, tuple[str, ...]]
    trace: str
    timeout: float  # seconds a step may wait for another worker


@define
class _Step:
    """The buffers of a running step, and what is under way."""

    number: int
    held: dict[str, Any] = field(factory=dict)  # jax arrays, or _Arriving
    sending: dict[str, list[Future[None]]] = field(factory=dict)
    sent: dict[int, int] = field(factory=dict)  # messages so far, per peer mesh
    received: dict[int, int] = field(factory=dict)


@frozen
class _Arriving:
    """A received buffer whose bytes have not been looked at yet."""

    key: str
    peer: int
    position: int


def worker_name(mesh: int, host: int) -> str:
    """Return what errors and the data plane call a worker."""
    return f"mesh {mesh} host {host}"


class MeshWorker:
    """Host `host` of mesh `mesh`; `devices` are all devices of the mesh, host by host."""

    def __init__(
        self,
        mesh: int,
        host: int,
        meshes: Sequence[WorkerMesh],
        plane: Plane,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self.mesh, self.host, self.meshes, self.plane = mesh, host, tuple(meshes), plane
        own = self.meshes[mesh]
        chosen = list(jax.devices() if devices is None else devices)
        wanted = int(np.prod(own.shape))
        if len(chosen) != wanted:
            raise ValueError(
                f"{self.name}: the mesh of shape {own.shape} needs {wanted} devices on "
                f"{own.num_hosts} hosts, but jax sees {len(chosen)}"
            )
        self.jax_mesh = Mesh(
            np.array(chosen).reshape(own.shape),
            own.axis_names,
            axis_types=(AxisType.Auto,) * len(own.axis_names),
        )
        self._host_of = {
            device: position * own.num_hosts // wanted for position, device in enumerate(chosen)
        }
        self._pace = Pace(self.jax_mesh)
        self._resident: dict[str, jax.Array] = {}
        self._program: WorkerProgram | None = None
        self._instructions: tuple[Instruction, ...] = ()
        self._tasks: dict[str, TaskProgram] = {}

    @property
    def name(self) -> str:
        return worker_name(self.mesh, self.host)

    def load(self, program: WorkerProgram) -> None:
        """Install a program; resident buffers stay."""
        schedule = from_json(program.schedule, PipelineSchedule, source="the schedule")
        self._instructions = schedule.programs[self.mesh]
        self._tasks = task_programs(
            self._instructions, program.executables, self.jax_mesh, program.donated
        )
        self._program = program

    def put(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Make whole arrays resident in the layout of this mesh."""
        for name, array in inputs.items():
            self._resident[name] = self._place(name, array)

    def step(
        self, number: int, batch: Mapping[str, NDArray[Any]]
    ) -> tuple[dict[str, list[tuple[Box, NDArray[Any]]]], list[tuple[int, float, float]]]:
        """Execute the list once; return this host's tiles of the outputs, and the trace.

        The trace holds (position, start, stop) in seconds since the epoch.
        """
        program = self._loaded()
        state = _Step(number)
        state.held = {
            **self._resident,
            **{name: self._place(name, array) for name, array in batch.items()},
        }
        check_present(self.mesh, program.inputs, state.held)
        recorder, origin = Recorder(program.trace, self.mesh + 1), time.time()
        try:
            for position, instruction in enumerate(self._instructions):
                self._execute(state, position, instruction, recorder)
            outputs = {}
            for name in program.outputs:
                outputs[name] = self._tiles_to_return(self._value(state, name))
            self._keep_resident(state, batch)
            for futures in state.sending.values():
                for future in futures:
                    future.result(program.timeout)
        finally:
            events = recorder.finish()
        positions = {id(each): k for k, each in enumerate(self._instructions)}
        trace = [(positions[id(e.instruction)], origin + e.start, origin + e.stop) for e in events]
        return outputs, trace

    def fetch(self, names: Sequence[str]) -> dict[str, list[tuple[Box, NDArray[Any]]]]:
        """Return this host's tiles of resident buffers; names it does not hold are left out."""
        return {
            name: self._tiles_to_return(self._resident[name])
            for name in names
            if name in self._resident
        }

    def close(self) -> None:
        """Drop all buffers and close the data plane."""
        self._resident.clear()
        self.plane.close()

    def _loaded(self) -> WorkerProgram:
        if self._program is None:
            raise RuntimeError("no schedule is loaded; call load() first")
        return self._program

    def _sharding(self, value: str) -> NamedSharding:
        partition_spec: Any = PartitionSpec
        return NamedSharding(self.jax_mesh, partition_spec(*self._loaded().specs[self.mesh][value]))

    def _place(self, name: str, array: NDArray[Any]) -> jax.Array:
        whole = np.asarray(array)
        sharding = self._sharding(value_name(name))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def _execute(
        self, state: _Step, position: int, instruction: Instruction, recorder: Recorder
    ) -> None:
        start = recorder.now()
        read: Sequence[jax.Array] = ()
        written: Sequence[jax.Array] = ()
        if instruction.kind == "run":
            read = [self._value(state, name) for name in instruction.inputs]
            donated = self._loaded().donated.get(instruction.task, ())
            for name in instruction.inputs:
                if value_name(name) in donated:
                    self._await_sends(state, name)
            written = call(self._tasks, self.mesh, position, instruction, read)
            state.held.update(zip(instruction.outputs, written, strict=True))
            self._pace.issued(written)
        elif instruction.kind == "send":
            for name in instruction.inputs:
                self._send(state, instruction, name, self._value(state, name))
        elif instruction.kind == "receive":
            assert instruction.peer is not None
            for name in instruction.outputs:
                count = state.received.get(instruction.peer, 0)
                state.received[instruction.peer] = count + 1
                key = self._key(state, instruction.peer, self.mesh, count, name)
                state.held[name] = _Arriving(key, instruction.peer, position)
        else:
            for name in instruction.inputs:
                arriving = state.held.pop(name)
                if isinstance(arriving, _Arriving):
                    self._receive(name, arriving)
        if recorder.mode != "none":
            recorder.record(self.mesh, instruction, start, read, written)

    def _value(self, state: _Step, name: str) -> jax.Array:
        """Return a buffer, taking its bytes from the inbox if it has just been received."""
        value = state.held[name]
        if isinstance(value, _Arriving):
            value = state.held[name] = self._receive(name, value)
        found: jax.Array = value
        return found

    def _await_sends(self, state: _Step, name: str) -> None:
        """Wait until the sends of a buffer that is about to be overwritten have read it."""
        for future in state.sending.pop(name, ()):
            future.result(self._loaded().timeout)

    def _key(self, state: _Step, source: int, target: int, count: int, name: str) -> str:
        return f"step {state.number}: {name} from mesh {source} to mesh {target}, message {count}"

    def _send(self, state: _Step, instruction: Instruction, name: str, array: jax.Array) -> None:
        """Hand this host's pieces of `array` to the sending threads: a message per target host."""
        peer = instruction.peer
        assert peer is not None
        count = state.sent.get(peer, 0)
        state.sent[peer] = count + 1
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
            raise StepError(
                f"{self.name} cannot send {name!r} of dtype {array.dtype} between processes; send "
                "jax.random.key_data of it and wrap it again"
            )
        shape = array.shape
        source = [
            (self._host_of[device], box_of(index, shape))
            for device, index in array.sharding.devices_indices_map(shape).items()
        ]
        spec = self._loaded().specs[peer][value_name(name)]
        target = self.meshes[peer].host_boxes(shape, spec)
        assigned = assign_pieces(source, target)
        key = self._key(state, self.mesh, peer, count, name)
        for receiver in range(self.meshes[peer].num_hosts):
            boxes = assigned.get((self.host, receiver), [])

            def make(boxes: list[Box] = boxes) -> Content:
                tiles = {
                    box_of(shard.index, shape): np.asarray(shard.data)
                    for shard in array.addressable_shards
                }
                header = {"key": key, "dtype": str(array.dtype), "shape": shape, "boxes": boxes}
                return header, pack(boxes, tiles)

            future = self.plane.send(worker_name(peer, receiver), make)
            state.sending.setdefault(name, []).append(future)

    def _receive(self, name: str, arriving: _Arriving) -> jax.Array:
        """Return the array put together from the messages of every host of the sending mesh."""
        pieces: list[tuple[Box, NDArray[Any]]] = []
        shape: tuple[int, ...] = ()
        dtype: Any = None
        for host in range(self.meshes[arriving.peer].num_hosts):
            sender = worker_name(arriving.peer, host)
            try:
                header, payload = self.plane.take(arriving.key, sender, self._loaded().timeout)
                boxes = [tuple((int(a), int(b)) for a, b in box) for box in header["boxes"]]
                shape, dtype = tuple(header["shape"]), jax.numpy.dtype(header["dtype"])
                pieces += unpack(payload[0], boxes, dtype)
            except (DataPlaneError, ValueError, KeyError, TypeError) as error:
                where = describe(
                    self.mesh, arriving.position, self._instructions[arriving.position]
                )
                raise StepError(f"{where} on host {self.host} failed: {error}") from error
        sharding = self._sharding(value_name(name))
        tiles: dict[Box, NDArray[Any]] = {}
        shards = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            box = box_of(index or (), shape)
            if box not in tiles:
                tiles[box] = assemble(box, pieces, dtype)
            shards.append(jax.device_put(tiles[box], device))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _tiles_to_return(self, array: jax.Array) -> list[tuple[Box, NDArray[Any]]]:
        """Return the tiles of which this host has the first replica; all hosts together: all."""
        return [
            (box_of(shard.index, array.shape), np.asarray(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]

    def _keep_resident(self, state: _Step, batch: Mapping[str, Any]) -> None:
        program = self._loaded()
        kept = {
            name: state.held[name]
            for name in dict.fromkeys((*program.inputs, *self._resident))
            if name in state.held and name not in batch and not state.held[name].is_deleted()
        }
        for source, target in program.carry.items():
            kept[target] = self._value(state, source)
        self._resident = kept
