"""The order in which one thread can execute all programs of a schedule, checked before a step.

`check_schedule` interprets the instruction lists without data. A schedule that would block, read a
buffer that is not there, or pair a send with the wrong receive is refused with the mesh, the
position in its list and the buffer, so that none of this can happen in the middle of a step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_interchange.schedule import Instruction, PipelineSchedule


class ScheduleError(ValueError):
    """A schedule cannot be executed; the message names mesh, position, instruction and buffer."""


@frozen(kw_only=True)
class ScheduleOrder:
    """What a checked schedule does, mesh by mesh.

    `turns` holds (mesh, position in its program) in an order that respects every send before its
    receive. `inputs[mesh]` are the buffers that must be on the mesh before the step, in the order
    of first use; `remaining[mesh]` those that are there after it.
    """

    turns: tuple[tuple[int, int], ...]
    inputs: tuple[tuple[str, ...], ...]
    remaining: tuple[tuple[str, ...], ...]

    @functools.cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """The meshes that each input must be on before the step."""
        return _by_name(self.inputs)

    @functools.cached_property
    def microbatches(self) -> Mapping[str, tuple[str, ...]]:
        """The inputs that are all microbatches of a value, in their order: "x" -> "x@0", "x@1"; of
        values of which the same meshes read each."""
        found: dict[str, dict[int, str]] = {}
        for name in self.readers:
            value, _, number = name.rpartition("@")
            if number.isdigit() and value not in self.readers:
                found.setdefault(value, {})[int(number)] = name
        return {
            value: tuple(names[k] for k in range(len(names)))
            for value, names in found.items()
            if sorted(names) == list(range(len(names)))
            and len({self.readers[name] for name in names.values()}) == 1
        }

    def reading(self, name: str) -> tuple[int, ...]:
        """Return the meshes that read an input, or all microbatches of a value; () if none does."""
        first, *_ = self.microbatches.get(name, (name,))
        return self.readers.get(first, ())

    @functools.cached_property
    def values(self) -> tuple[tuple[str, ...], ...]:
        """The inputs of each mesh, with one entry in place of all microbatches of a value."""
        known = self.microbatches
        return tuple(
            tuple(dict.fromkeys(one if (one := value_name(n)) in known else n for n in names))
            for names in self.inputs
        )

    @functools.cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The meshes that each buffer is on after the step."""
        return _by_name(self.remaining)


def _by_name(names: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for mesh, of_mesh in enumerate(names):
        for name in of_mesh:
            found[name] = (*found.get(name, ()), mesh)
    return found


def value_name(buffer: str) -> str:
    """Return the value of a buffer name: "h" for "h@3", the name itself for a per-step buffer."""
    return buffer.rpartition("@")[0] or buffer


def describe(mesh: int, position: int, instruction: Instruction) -> str:
    """Return the words that name one instruction in an error: mesh, position, kind, buffers."""
    parts = [instruction.kind]
    if instruction.task:
        parts.append(repr(instruction.task))
    if instruction.microbatch is not None:
        parts.append(f"of microbatch {instruction.microbatch}")
    if instruction.kind == "send":
        parts.append(f"of {', '.join(instruction.inputs)} to mesh {instruction.peer}")
    if instruction.kind == "receive":
        parts.append(f"of {', '.join(instruction.outputs)} from mesh {instruction.peer}")
    if instruction.kind == "free":
        parts.append(f"of {', '.join(instruction.inputs)}")
    return f"mesh {mesh}, instruction {position} ({' '.join(parts)})"


def check_schedule(schedule: PipelineSchedule) -> ScheduleOrder:
    """Return the order and the boundary buffers of `schedule`; ScheduleError says what is wrong."""
    interpreter = _Interpreter(schedule)
    while interpreter.advance_round():
        pass
    return interpreter.result()


class _Interpreter:
    """Runs the programs on buffer names only, each mesh up to its next run per turn."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        num_meshes = len(schedule.programs)
        self.programs = schedule.programs
        self.position = [0] * num_meshes
        self.alive: list[dict[str, None]] = [{} for _ in range(num_meshes)]
        self.gone: list[set[str]] = [set() for _ in range(num_meshes)]
        self.inputs: list[dict[str, None]] = [{} for _ in range(num_meshes)]
        self.channels: dict[tuple[int, int], deque[tuple[str, ...]]] = {}
        self.turns: list[tuple[int, int]] = []

    def advance_round(self) -> bool:
        """Advance every mesh to behind its next run; return whether any mesh moved."""
        moved = False
        for mesh, program in enumerate(self.programs):
            while self.position[mesh] < len(program):
                position = self.position[mesh]
                instruction = program[position]
                if not self._execute(mesh, position, instruction):
                    break
                moved = True
                self.turns.append((mesh, position))
                self.position[mesh] += 1
                if instruction.kind == "run":
                    break
        return moved

    def result(self) -> ScheduleOrder:
        """Return the order once no mesh can move; refuse deadlocks and sends nobody receives."""
        stuck = [
            describe(mesh, at, self.programs[mesh][at])
            for mesh, at in enumerate(self.position)
            if at < len(self.programs[mesh])
        ]
        if stuck:
            raise ScheduleError(
                "the schedule blocks: no mesh can go on. Waiting for sends that never come: "
                + "; ".join(stuck)
            )
        for (source, target), queue in self.channels.items():
            if queue:
                raise ScheduleError(
                    f"mesh {source} sends {', '.join(queue[0])} to mesh {target}, which never "
                    "receives it; every send needs a receive in the same order"
                )
        return ScheduleOrder(
            turns=tuple(self.turns),
            inputs=tuple(tuple(names) for names in self.inputs),
            remaining=tuple(tuple(names) for names in self.alive),
        )

    def _execute(self, mesh: int, position: int, instruction: Instruction) -> bool:
        """Apply one instruction to the buffer names; return False if it must wait for a send."""
        if instruction.kind == "receive":
            return self._receive(mesh, position, instruction)
        for name in instruction.inputs:
            self._read(mesh, position, instruction, name)
        if instruction.kind == "run":
            for name in instruction.outputs:
                self.alive[mesh][name] = None
        elif instruction.kind == "send":
            peer = self._peer(mesh, position, instruction)
            self.channels.setdefault((mesh, peer), deque()).append(instruction.inputs)
        else:
            for name in instruction.inputs:
                del self.alive[mesh][name]
                self.gone[mesh].add(name)
        return True

    def _receive(self, mesh: int, position: int, instruction: Instruction) -> bool:
        peer = self._peer(mesh, position, instruction)
        queue = self.channels.get((peer, mesh))
        if not queue:
            return False
        sent = queue.popleft()
        if sent != instruction.outputs:
            raise ScheduleError(
                f"{describe(mesh, position, instruction)} expects "
                f"{', '.join(instruction.outputs)}, but the next send of mesh {peer} to it "
                f"carries {', '.join(sent)}; sends and receives between two meshes must match in "
                "order"
            )
        for name in instruction.outputs:
            if name in self.alive[mesh]:
                raise ScheduleError(
                    f"{describe(mesh, position, instruction)} would overwrite buffer {name!r}, "
                    "which is still there; free it first"
                )
            self.alive[mesh][name] = None
        return True

    def _read(self, mesh: int, position: int, instruction: Instruction, name: str) -> None:
        if name in self.alive[mesh]:
            return
        if name in self.gone[mesh]:
            raise ScheduleError(
                f"{describe(mesh, position, instruction)} reads buffer {name!r}, which an earlier "
                "free dropped; move the free behind the last use"
            )
        self.inputs[mesh][name] = None
        self.alive[mesh][name] = None

    def _peer(self, mesh: int, position: int, instruction: Instruction) -> int:
        peer = instruction.peer
        if peer is None or not 0 <= peer < len(self.programs) or peer == mesh:
            raise ScheduleError(
                f"{describe(mesh, position, instruction)}: peer must be another mesh of the "
                f"{len(self.programs)} in the schedule, got {peer}"
            )
        return peer
