"""All meshes in one process: one Python thread issues every mesh's instructions, jax runs them.

jax dispatch is asynchronous, so the thread walks the instruction lists in dependency order, and the
meshes compute side by side as far as the devices allow. A send hands over the reference; the receive
starts the copy to the layout of the receiving mesh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from alpa_interchange.schedule import Instruction, PipelineSchedule
from attrs import field, frozen
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mesh_runtime.exported import executable_of
from mesh_runtime.order import ScheduleOrder, check_schedule, describe, value_name
from mesh_runtime.runtime import Executable, StepError, ValueShardings
from mesh_runtime.trace import Recorder, TraceEvent

Transfer = Callable[[jax.Array, Sharding], jax.Array]
Buffers = dict[str, jax.Array]


@frozen(kw_only=True)
class _Loaded:
    """A checked schedule with everything a step needs."""

    schedule: PipelineSchedule
    order: ScheduleOrder
    executables: Mapping[str, Callable[..., Sequence[jax.Array]]]
    shardings: tuple[dict[str, NamedSharding], ...] = field(repr=False)
    outputs: tuple[str, ...]
    carry: dict[str, str]


class InProcessRuntime:
    """Runs pipeline schedules on meshes of this process's devices; follows `Runtime`.

    `transfer(array, sharding)` moves a value to another mesh (default `jax.device_put`). `trace` is
    one of "none", "dispatch", "ready", "blocking" (see `Recorder`); the events of the last step are in
    the attribute `trace`.
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
        donated: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Check and install a schedule; see `Runtime.load`. Resident buffers stay where they are."""
        if len(schedule.programs) != len(self.meshes):
            raise ValueError(
                f"the schedule {schedule.name!r} has programs for {len(schedule.programs)} meshes, but "
                f"the runtime was made with {len(self.meshes)}"
            )
        if len(shardings) != len(self.meshes):
            raise ValueError(
                f"shardings must have one mapping per mesh ({len(self.meshes)}), got {len(shardings)}"
            )
        order = check_schedule(schedule)
        placed = tuple(
            {value: _on_mesh(index, mesh, value, spec) for value, spec in mapping.items()}
            for index, (mesh, mapping) in enumerate(zip(self.meshes, shardings, strict=True))
        )
        callables = _prepare(schedule, executables, self.meshes, donated or {})
        _check_shardings(schedule, order, placed)
        outputs, carry = tuple(outputs), dict(carry or {})
        _check_outputs(order, outputs, carry)
        self._loaded = _Loaded(
            schedule=schedule,
            order=order,
            executables=callables,
            shardings=placed,
            outputs=outputs,
            carry=carry,
        )

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Make `inputs` resident on every mesh that reads them; arrays already there are not copied."""
        loaded = self._program()
        for mesh, name in _destinations(loaded.order, inputs, "put"):
            self._resident[mesh][name] = self._place(loaded, mesh, name, inputs[name])

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Issue one step and return its outputs without waiting for them."""
        loaded = self._program()
        resident, batch_buffers = self._resident, [dict[str, jax.Array]() for _ in self.meshes]
        for mesh, name in _destinations(loaded.order, batch, "step"):
            batch_buffers[mesh][name] = self._place(loaded, mesh, name, batch[name])
        buffers = [{**resident[mesh], **batch_buffers[mesh]} for mesh in range(len(self.meshes))]
        for mesh, names in enumerate(loaded.order.inputs):
            missing = [name for name in names if name not in buffers[mesh]]
            if missing:
                raise StepError(
                    f"mesh {mesh} reads {_listing(missing)} before anything writes it; give it to "
                    "put() (state) or step() (batch). A state buffer that the schedule frees or donates "
                    "needs an entry in `carry` to survive the step"
                )
        recorder = Recorder(self.trace_mode, len(self.meshes))
        try:
            self._issue(loaded, buffers, recorder)
            outputs = self._collect(loaded, buffers)
            self._keep_resident(loaded, buffers, set(batch))
        except BaseException:
            for held in self._resident:
                for name in [name for name, array in held.items() if array.is_deleted()]:
                    del held[name]
            raise
        finally:
            self._trace = recorder.finish()
        return outputs

    def fetch(self, names: Iterable[str]) -> dict[str, Any]:
        """Return resident buffers, as laid out on the first mesh that holds each."""
        found = {}
        for name in names:
            holder = next((held for held in self._resident if name in held), None)
            if holder is None:
                known = sorted({name for held in self._resident for name in held})
                raise KeyError(f"no mesh holds buffer {name!r}; resident are {_listing(known)}")
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
        return jax.device_put(array, sharding)

    def _issue(self, loaded: _Loaded, buffers: list[Buffers], recorder: Recorder) -> None:
        """Execute every instruction in dependency order."""
        tracing = recorder.mode != "none"
        channels: dict[tuple[int, int], deque[tuple[jax.Array, ...]]] = {}
        programs = loaded.schedule.programs
        for mesh, position in loaded.order.turns:
            instruction = programs[mesh][position]
            held = buffers[mesh]
            start = recorder.now() if tracing else 0.0
            read: Sequence[jax.Array] = ()
            written: Sequence[jax.Array] = ()
            if instruction.kind == "run":
                read = [held[name] for name in instruction.inputs]
                written = _run(loaded, mesh, position, instruction, read)
                held.update(zip(instruction.outputs, written, strict=True))
            elif instruction.kind == "send":
                assert instruction.peer is not None
                values = tuple(held[name] for name in instruction.inputs)
                channels.setdefault((mesh, instruction.peer), deque()).append(values)
            elif instruction.kind == "receive":
                assert instruction.peer is not None
                read = channels[instruction.peer, mesh].popleft()
                written = self._receive(loaded, mesh, position, instruction, read)
                held.update(zip(instruction.outputs, written, strict=True))
            else:
                for name in instruction.inputs:
                    del held[name]
            if tracing:
                recorder.record(mesh, instruction, start, read, written)

    def _receive(
        self,
        loaded: _Loaded,
        mesh: int,
        position: int,
        instruction: Instruction,
        arrays: Sequence[jax.Array],
    ) -> list[jax.Array]:
        shardings = loaded.shardings[mesh]
        received = []
        for name, array in zip(instruction.outputs, arrays, strict=True):
            try:
                received.append(self._transfer(array, shardings[value_name(name)]))
            except Exception as error:
                gone = ": it was donated to a run before" if array.is_deleted() else ""
                raise StepError(
                    f"{describe(mesh, position, instruction)}: moving {name!r} failed{gone}: {error}"
                ) from error
        return received

    def _collect(self, loaded: _Loaded, buffers: list[Buffers]) -> dict[str, Any]:
        return {name: _holder(buffers, name)[name] for name in loaded.outputs}

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
            for mesh, names in enumerate(loaded.order.inputs):
                if target not in names:
                    continue
                if source in buffers[mesh]:
                    kept[mesh][target] = buffers[mesh][source]
                else:
                    array = _holder(buffers, source)[source]
                    kept[mesh][target] = self._transfer(array, loaded.shardings[mesh][target])
        self._resident = kept


def _run(
    loaded: _Loaded,
    mesh: int,
    position: int,
    instruction: Instruction,
    arguments: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """Return what the executable of a run gives; an error names the instruction and the culprit."""
    try:
        results = loaded.executables[instruction.task](*arguments)
    except Exception as error:
        gone = [
            name
            for name, array in zip(instruction.inputs, arguments, strict=True)
            if array.is_deleted()
        ]
        reason = (
            f"its input {_listing(gone)} was donated to an earlier run; a donated buffer may not be read "
            f"again ({error})"
            if gone
            else str(error)
        )
        raise StepError(f"{describe(mesh, position, instruction)} failed: {reason}") from error
    if not isinstance(results, tuple | list) or len(results) != len(instruction.outputs):
        came = f"{len(results)} arrays" if isinstance(results, tuple | list) else type(results)
        raise StepError(
            f"{describe(mesh, position, instruction)} must return {len(instruction.outputs)} arrays "
            f"({_listing(instruction.outputs)}), but its executable returned {came}"
        )
    return results


def _prepare(
    schedule: PipelineSchedule,
    executables: Mapping[str, Executable],
    meshes: Sequence[Mesh],
    donated: Mapping[str, Sequence[str]],
) -> dict[str, Callable[..., Sequence[jax.Array]]]:
    """Return a callable per task the schedule runs; exported programs are loaded for their mesh."""
    ready: dict[str, Callable[..., Sequence[jax.Array]]] = {}
    where: dict[str, int] = {}
    for mesh, program in enumerate(schedule.programs):
        for position, instruction in enumerate(program):
            task = instruction.task
            if instruction.kind != "run" or where.get(task) == mesh:
                continue
            if task in where:
                raise ValueError(
                    f"task {task!r} runs on mesh {where[task]} and on mesh {mesh}; a task belongs to one "
                    "mesh, so give the two programs different names"
                )
            where[task] = mesh
            if task not in executables:
                raise ValueError(
                    f"{describe(mesh, position, instruction)} has no executable; executables are given "
                    f"for {_listing(sorted(executables))}"
                )
            values = tuple(value_name(name) for name in instruction.inputs)
            ready[task] = executable_of(
                task, executables[task], meshes[mesh], values, tuple(donated.get(task, ()))
            )
    return ready


def _on_mesh(
    index: int, mesh: Mesh, value: str, spec: NamedSharding | PartitionSpec
) -> NamedSharding:
    """Return the layout of `value` on mesh number `index`; refuse devices outside it."""
    if isinstance(spec, PartitionSpec):
        return NamedSharding(mesh, spec)
    if not isinstance(spec, NamedSharding):
        raise TypeError(
            f"shardings[{index}][{value!r}] must be a NamedSharding or PartitionSpec, got {spec!r}"
        )
    inside = set(mesh.devices.flat)
    if isinstance(spec.mesh, Mesh) and not spec.device_set <= inside:
        raise ValueError(
            f"shardings[{index}][{value!r}] covers {len(spec.device_set)} devices, of which "
            f"{len(spec.device_set - inside)} are not among the {len(inside)} devices of mesh {index}"
        )
    return spec if isinstance(spec.mesh, Mesh) else NamedSharding(mesh, spec.spec)


def _check_shardings(
    schedule: PipelineSchedule,
    order: ScheduleOrder,
    shardings: Sequence[Mapping[str, NamedSharding]],
) -> None:
    """Refuse a schedule with an input or received value whose layout is unknown."""
    for mesh, program in enumerate(schedule.programs):
        for name in order.inputs[mesh]:
            if value_name(name) not in shardings[mesh]:
                raise ValueError(f"input {name!r} of mesh {mesh} has no entry in shardings[{mesh}]")
        for position, instruction in enumerate(program):
            if instruction.kind == "receive":
                for name in instruction.outputs:
                    if value_name(name) not in shardings[mesh]:
                        raise ValueError(
                            f"{describe(mesh, position, instruction)}: {value_name(name)!r} has no entry "
                            f"in shardings[{mesh}], so its layout there is unknown"
                        )


def _check_outputs(order: ScheduleOrder, outputs: Sequence[str], carry: Mapping[str, str]) -> None:
    """Refuse outputs and carried buffers that no mesh holds after a step."""
    remaining = {name for names in order.remaining for name in names}
    inputs = {name for names in order.inputs for name in names}
    for name in outputs:
        if name not in remaining:
            raise ValueError(
                f"output {name!r} is on no mesh after the step; it is never written, or it is freed"
            )
    for source, target in carry.items():
        if source not in remaining:
            raise ValueError(
                f"carry: {source!r} (to become {target!r}) is on no mesh after the step; it is never "
                "written, or it is freed"
            )
        if target not in inputs:
            raise ValueError(
                f"carry: {target!r} (to be replaced by {source!r}) is an input of no mesh"
            )


def _destinations(order: ScheduleOrder, names: Iterable[str], verb: str) -> list[tuple[int, str]]:
    """Return (mesh, name) for every mesh that has `name` as an input; refuse unknown names."""
    found = []
    for name in names:
        meshes = [mesh for mesh, inputs in enumerate(order.inputs) if name in inputs]
        if not meshes:
            known = sorted({name for inputs in order.inputs for name in inputs})
            raise ValueError(
                f"{verb}: {name!r} is an input of no mesh; the schedule's inputs are {_listing(known)}"
            )
        found += [(mesh, name) for mesh in meshes]
    return found


def _holder(buffers: Sequence[Buffers], name: str) -> Buffers:
    return next(held for held in buffers if name in held)


def _listing(names: Sequence[str], limit: int = 12) -> str:
    """Return names for a message, shortened past `limit`."""
    shown = ", ".join(repr(name) for name in names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
