"""All meshes in one process: one Python thread issues every mesh's instructions, jax runs them.

jax dispatch is asynchronous, so the thread walks the instruction lists in dependency order, and the
meshes compute side by side as far as the devices allow. A send hands over the reference; the
receive starts the copy to the layout of the receiving mesh. Of what a step is given the send does,
since a run that replaces it may overwrite it before it is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from attrs import field, frozen
from jax.sharding import Mesh, NamedSharding, Sharding

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime.boundary import (
    apart,
    check_present,
    complete_layouts,
    destinations,
    layout_on,
    listing,
)
from mesh_runtime.carry import check_outputs, parts_of, with_carries
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.order import ScheduleOrder, check_schedule, describe, value_name
from mesh_runtime.pacing import Pace
from mesh_runtime.runtime import Array, Executable, StepError, ValueShardings
from mesh_runtime.task_programs import (
    IssuedRuns,
    LoadedProgram,
    TaskProgram,
    call,
    check_tasks,
    task_programs,
)
from mesh_runtime.trace import Recorder, TraceEvent

Transfer = Callable[[jax.Array, Sharding], jax.Array]
Buffers = dict[str, jax.Array]


@frozen(kw_only=True)
class _Loaded:
    """A checked schedule with everything a step needs."""

    schedule: PipelineSchedule
    order: ScheduleOrder
    programs: tuple[dict[str, TaskProgram], ...] = field(repr=False)
    shardings: tuple[dict[str, NamedSharding], ...] = field(repr=False)
    outputs: tuple[str, ...]
    carry: dict[str, str]
    joined: dict[str, int]
    given: tuple[frozenset[str], ...] = field(repr=False)  # what a step is given, by mesh


class InProcessRuntime:
    """Runs pipeline schedules on meshes of this process's devices; follows `Runtime`.

    `transfer(array, sharding)` moves a value to another mesh (default `jax.device_put`). `trace` is
    one of "none", "dispatch", "ready", "blocking" (see `Recorder`); the events of the last step
    are in the attribute `trace`.
    """

    def __init__(
        self,
        meshes: Sequence[Mesh],
        *,
        transfer: Transfer | None = None,
        trace: str = "none",
    ) -> None:
        if not meshes:
            raise ValueError("InProcessRuntime needs at least one mesh, got none")
        self.meshes = tuple(meshes)
        self.trace_mode = trace
        self._transfer: Transfer = jax.device_put if transfer is None else transfer
        self._paces = tuple(Pace(mesh) for mesh in self.meshes)
        self._loaded: _Loaded | None = None
        self._resident: list[Buffers] = [{} for _ in meshes]
        self._trace: tuple[TraceEvent, ...] = ()
        Recorder("none" if trace == "ready" else trace, 0)

    @property
    def trace(self) -> tuple[TraceEvent, ...]:
        """The events of the last step; empty unless the runtime was made with a trace mode."""
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
        """Check and install a schedule; see `Runtime.load`. Resident buffers stay."""
        if len(schedule.programs) != len(self.meshes):
            raise ValueError(
                f"the schedule {schedule.name!r} has programs for {len(schedule.programs)} "
                f"meshes, but the runtime was made with {len(self.meshes)}"
            )
        if len(shardings) != len(self.meshes):
            raise ValueError(
                f"shardings must have one mapping per mesh ({len(self.meshes)}), got "
                f"{len(shardings)}"
            )
        outputs, carry, joined = tuple(outputs), dict(carry or {}), dict(joined or {})
        order = check_schedule(schedule)
        check_outputs(order, outputs, carry, joined, schedule.num_microbatches)
        check_tasks(schedule.programs, executables)
        schedule = with_carries(schedule, order, carry)
        order = check_schedule(schedule)
        placed = tuple(
            {value: layout_on(index, mesh, value, spec) for value, spec in mapping.items()}
            for index, (mesh, mapping) in enumerate(
                zip(self.meshes, complete_layouts(schedule, order, shardings, carry), strict=True)
            )
        )
        self._loaded = _Loaded(
            schedule=schedule,
            order=order,
            programs=tuple(
                task_programs(program, executables, mesh)
                for program, mesh in zip(schedule.programs, self.meshes, strict=True)
            ),
            shardings=placed,
            outputs=outputs,
            carry=carry,
            joined=joined,
            given=tuple(map(frozenset, order.inputs)),
        )

    def init(
        self, programs: Mapping[int, Executable], arguments: Sequence[Any]
    ) -> dict[int, list[Array]]:
        """Return what a program makes of `arguments` on each mesh."""
        made: dict[int, list[Array]] = {}
        for mesh, program in programs.items():
            if isinstance(program, ExportedProgram):
                name = f"mesh {mesh}"
                loaded = LoadedProgram(name, program, self.meshes[mesh], len(arguments))
                made[mesh] = list(loaded(*loaded.placed(arguments)))
            else:
                made[mesh] = list(program(*arguments))
        return made

    def place(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Return `inputs` laid out as the schedule reads them; arrays in place are not copied."""
        loaded = self._program()
        placed: dict[str, Array] = {}
        for mesh, name in destinations(loaded.order, inputs, "place"):
            if name not in placed:
                placed[name] = self._place(loaded, mesh, name, inputs[name])
        return placed

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh that reads them; arrays in place are not copied."""
        loaded = self._program()
        for mesh, name in destinations(loaded.order, inputs, "put"):
            self._resident[mesh][name] = self._place(loaded, mesh, name, inputs[name])

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Issue one step and return its outputs without waiting for them."""
        loaded = self._program()
        batch = apart(loaded.order, batch)
        resident, batch_buffers = self._resident, [dict[str, jax.Array]() for _ in self.meshes]
        for mesh, name in destinations(loaded.order, batch, "step"):
            batch_buffers[mesh][name] = self._place(loaded, mesh, name, batch[name])
        buffers = [{**resident[mesh], **batch_buffers[mesh]} for mesh in range(len(self.meshes))]
        for mesh, names in enumerate(loaded.order.inputs):
            check_present(mesh, names, buffers[mesh])
        recorder, issued = Recorder(self.trace_mode, len(self.meshes)), IssuedRuns()
        try:
            self._issue(loaded, buffers, recorder, issued)
            outputs = self._collect(loaded, buffers)
            self._keep_resident(loaded, buffers, set(batch))
        except BaseException as error:
            for held in self._resident:
                for name in [name for name, array in held.items() if array.is_deleted()]:
                    del held[name]
            failure = issued.failure() if isinstance(error, Exception) else None
            if failure is not None:
                raise failure from error
            raise
        finally:
            self._trace = tuple(
                TraceEvent(
                    one.mesh,
                    loaded.schedule.programs[one.mesh][one.position],
                    one.start,
                    one.stop,
                )
                for one in recorder.finish()
            )
        return outputs

    def fetch(self, names: Iterable[str]) -> dict[str, Any]:
        """Return resident buffers, as laid out on the first mesh that holds each."""
        found = {}
        for name in names:
            holder = next((held for held in self._resident if name in held), None)
            if holder is None:
                known = sorted({name for held in self._resident for name in held})
                raise KeyError(f"no mesh holds buffer {name!r}; resident are {listing(known)}")
            found[name] = holder[name]
        return found

    def close(self) -> None:
        """Drop every buffer and the loaded schedule."""
        self._loaded = None
        self._resident = [{} for _ in self.meshes]
        self._trace = ()

    def _program(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("no schedule is loaded; call load() first")
        return self._loaded

    def _place(self, loaded: _Loaded, mesh: int, name: str, array: Any) -> jax.Array:
        sharding = loaded.shardings[mesh][value_name(name)]
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        placed: jax.Array = jax.device_put(array, sharding)
        return placed

    def _issue(
        self, loaded: _Loaded, buffers: list[Buffers], recorder: Recorder, issued: IssuedRuns
    ) -> None:
        """Execute every instruction in dependency order."""
        tracing = recorder.mode != "none"
        channels: dict[tuple[int, int], deque[tuple[jax.Array, ...]]] = {}
        arrived: list[dict[str, int]] = [{} for _ in self.meshes]  # positions of receives
        programs = loaded.schedule.programs
        for mesh, position in loaded.order.turns:
            instruction = programs[mesh][position]
            held = buffers[mesh]
            start = recorder.now() if tracing else 0.0
            sent: Sequence[jax.Array] = ()
            written: Sequence[jax.Array] = ()
            if instruction.kind == "run":
                read = [held[name] for name in instruction.inputs]
                written = call(loaded.programs[mesh], mesh, position, instruction, read)
                issued.add(mesh, position, instruction, written)
                held.update(zip(instruction.outputs, written, strict=True))
            elif instruction.kind == "send":
                assert instruction.peer is not None
                values = tuple(
                    self._moved(loaded, mesh, position, instruction.peer, name, held[name])
                    if name in loaded.given[mesh]
                    else held[name]
                    for name in instruction.inputs
                )
                channels.setdefault((mesh, instruction.peer), deque()).append(values)
            elif instruction.kind == "receive":
                assert instruction.peer is not None
                sent = channels[instruction.peer, mesh].popleft()
                written = self._receive(loaded, mesh, position, instruction, sent)
                arrived[mesh].update(dict.fromkeys(instruction.outputs, position))
                held.update(zip(instruction.outputs, written, strict=True))
            else:
                for name in instruction.inputs:
                    del held[name]
            if tracing:
                received = {
                    arrived[mesh][name] for name in instruction.inputs if name in arrived[mesh]
                }
                recorder.record(
                    mesh, position, instruction.kind, start, sent, written, received=received
                )
            if instruction.kind == "run":
                self._paces[mesh].issued(written)

    def _receive(
        self,
        loaded: _Loaded,
        mesh: int,
        position: int,
        instruction: Instruction,
        arrays: Sequence[jax.Array],
    ) -> list[jax.Array]:
        return [
            self._moved(loaded, mesh, position, mesh, name, array)
            for name, array in zip(instruction.outputs, arrays, strict=True)
        ]

    def _moved(
        self, loaded: _Loaded, mesh: int, position: int, target: int, name: str, array: jax.Array
    ) -> jax.Array:
        """Return a value in its layout on the mesh `target`, as an instruction of `mesh` asks."""
        try:
            return self._transfer(array, loaded.shardings[target][value_name(name)])
        except Exception as error:
            instruction = loaded.schedule.programs[mesh][position]
            gone = ": it was donated to a run before" if array.is_deleted() else ""
            raise StepError(
                f"{describe(mesh, position, instruction)}: moving {name!r} failed{gone}: {error}"
            ) from error

    def _collect(self, loaded: _Loaded, buffers: list[Buffers]) -> dict[str, Any]:
        made: dict[str, Any] = {name: _holder(buffers, name)[name] for name in loaded.outputs}
        for name, dim in loaded.joined.items():
            parts = parts_of(name, loaded.schedule.num_microbatches)
            held = _holder(buffers, *parts)
            made[name] = jnp.concatenate([held[part] for part in parts], axis=dim)
        return made

    def _keep_resident(
        self, loaded: _Loaded, buffers: list[Buffers], batch_names: set[str]
    ) -> None:
        """Replace the resident buffers by what the step left of them and what it carries back."""
        kept: list[Buffers] = []
        for mesh, names in enumerate(loaded.order.inputs):
            held = buffers[mesh]
            stays = [*names, *(name for name in self._resident[mesh] if name not in names)]
            kept.append(
                {
                    name: held[name]
                    for name in stays
                    if name in held and name not in batch_names and not held[name].is_deleted()
                }
            )
        for source, target in loaded.carry.items():
            if target not in batch_names:
                for mesh in loaded.order.readers[target]:
                    kept[mesh][target] = buffers[mesh][source]
        self._resident = kept


def _holder(buffers: Sequence[Buffers], *names: str) -> Buffers:
    return next(held for held in buffers if all(name in held for name in names))
