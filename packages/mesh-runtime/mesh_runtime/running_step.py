"""A step that a worker runs: its buffers, and what is under way to and from other meshes."""

from __future__ import annotations

from typing import Any

from attrs import define, field, frozen

from alpa_interchange.schedule import Instruction
from mesh_runtime.task_programs import IssuedRuns, TaskProgram
from mesh_runtime.trace import Recorder
from mesh_runtime.transfers import Moves, Receiving, Sending
from mesh_runtime.worker_types import WorkerProgram


@define
class Loaded:
    """A program ready to run."""

    program: WorkerProgram
    instructions: tuple[Instruction, ...]
    tasks: dict[str, TaskProgram]
    moves: Moves = field(factory=dict)


@frozen
class Arriving:
    """A received buffer whose bytes have not been looked at yet."""

    receiving: Receiving
    peer: int
    position: int


@frozen
class Departing:
    """A buffer on its way to another mesh."""

    name: str
    position: int
    sending: Sending


@define
class RunningStep:
    """The buffers of a running step, and what is under way."""

    loaded: Loaded
    number: int
    recorder: Recorder
    held: dict[str, Any] = field(factory=dict)  # jax arrays, HostTiles, or Arriving
    sending: list[Departing] = field(factory=list)
    arriving: dict[tuple[int, str], Arriving] = field(factory=dict)  # by position and buffer
    issued: IssuedRuns = field(factory=IssuedRuns)
    sent: dict[int, int] = field(factory=dict)  # messages so far, per peer mesh
