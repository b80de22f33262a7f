"""Event simulator of pipeline schedules: the instruction lists that the runtime executes.

Every mesh executes its list in order. A run starts when the mesh is free and its inputs have
arrived. A transfer starts when the buffer is produced and the channel from that mesh to its peer is
free; with `blocking` sends the mesh does nothing else until it ends. Because each list is executed
in order and channels are first in, first out, the times follow from one pass over the lists; no
clock is advanced. Memory is counted in program order: a buffer is held from the run or receive that
defines it to its free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from attrs import field, frozen

from alpa_interchange.reshard import ReshardingPlan
from alpa_interchange.schedule import Instruction, PipelineSchedule

TransferSeconds = Callable[[int, int, str], float]
Transfers = Mapping[str, float | ReshardingPlan] | TransferSeconds | None


@frozen(kw_only=True)
class Timeline:
    """What one mesh does when: entry k is instruction `instructions[k]` of its program."""

    instructions: np.ndarray  # [entries] positions in the mesh's program: runs and sends
    starts: np.ndarray  # [entries] seconds
    stops: np.ndarray  # [entries] seconds


@frozen(kw_only=True)
class Simulation:
    """The simulated step. Per-mesh tuples are indexed by mesh number; seconds and bytes."""

    step_seconds: float
    timelines: tuple[Timeline, ...]
    busy_seconds: tuple[float, ...]  # running tasks
    bubble_seconds: tuple[float, ...]  # idle: step_seconds - busy
    exposed_seconds: tuple[float, ...]  # idle because a finished value was still on its way
    transfer_seconds: tuple[float, ...]  # time that sends of this mesh occupied channels
    peak_bytes: tuple[float, ...]  # largest sum of live buffers plus the running task's temporary
    schedule: PipelineSchedule = field(repr=False)


def simulate(
    schedule: PipelineSchedule,
    task_seconds: Mapping[str, float],
    transfer_seconds: Transfers = None,
    *,
    value_bytes: Mapping[str, float] | None = None,
    task_bytes: Mapping[str, float] | None = None,
    initial_bytes: tuple[float, ...] | None = None,
    blocking: bool = False,
) -> Simulation:
    """Return the simulation of one step of `schedule`.

    `task_seconds` maps task names to the seconds of one run. `transfer_seconds` maps the value name
    of a buffer (without `@microbatch`) to seconds or to the resharding plan that moves it, or is
    called as f(source mesh, target mesh, value name); None moves everything in no time.
    `value_bytes` maps value names to bytes per device, `task_bytes` task names to temporaries,
    `initial_bytes` is the state held per mesh from the start; what they leave out counts as
    nothing. Meshes that share one processor are simulated by `simulate_shared`.
    """
    return Execution(
        schedule,
        task_seconds,
        transfer_function(transfer_seconds),
        value_bytes or {},
        task_bytes or {},
        initial_bytes,
        blocking,
    ).result()


def transfer_function(given: Transfers) -> TransferSeconds:
    """Return f(source mesh, target mesh, value name) -> seconds for any form of `given`."""
    if given is None:
        return lambda source, target, value: 0.0
    if callable(given):
        return given
    table = given

    def look_up(source: int, target: int, value: str) -> float:
        seconds = table.get(value)
        if seconds is None:
            raise ValueError(
                f"transfer_seconds has no entry for value {value!r}, which mesh {source} sends to "
                f"mesh {target}; add it, or pass a function"
            )
        return seconds.seconds if isinstance(seconds, ReshardingPlan) else seconds

    return look_up


class Execution:
    """The state of one simulation; `result` executes all programs to their end."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        task_seconds: Mapping[str, float],
        transfer: TransferSeconds,
        value_bytes: Mapping[str, float],
        task_bytes: Mapping[str, float],
        initial_bytes: tuple[float, ...] | None,
        blocking: bool,
    ) -> None:
        self.schedule = schedule
        self.task_seconds = task_seconds
        self.transfer = transfer
        self.value_bytes = value_bytes
        self.task_bytes = task_bytes
        self.blocking = blocking
        count = len(schedule.programs)
        if initial_bytes is not None and len(initial_bytes) != count:
            raise ValueError(
                f"initial_bytes must have one entry per mesh ({count}), got {len(initial_bytes)}"
            )
        self.position = [0] * count
        self.clock = [0.0] * count  # when the mesh is free for its next run
        self.ready: list[dict[str, float]] = [{} for _ in range(count)]
        self.produced: list[dict[str, float]] = [{} for _ in range(count)]
        self.held: list[dict[str, float]] = [{} for _ in range(count)]
        self.live = list(initial_bytes) if initial_bytes is not None else [0.0] * count
        self.peak = list(self.live)
        self.busy = [0.0] * count
        self.exposed = [0.0] * count
        self.sent = [0.0] * count
        self.events: list[list[tuple[int, float, float]]] = [[] for _ in range(count)]
        self.channel_free: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[int, int], deque[tuple[str, float, float]]] = {}
        self.transfer_cache: dict[tuple[int, int, str], float] = {}

    def result(self) -> Simulation:
        programs = self.schedule.programs
        pending = deque(range(len(programs)))
        stuck = 0
        while pending:
            mesh = pending.popleft()
            before = self.position[mesh]
            self.advance(mesh)
            if self.position[mesh] < len(programs[mesh]):
                pending.append(mesh)
                stuck = stuck + 1 if self.position[mesh] == before else 0
                if stuck > len(pending):
                    raise ValueError(self.deadlock(pending))
            else:
                stuck = 0
        return self.summary()

    def advance(self, mesh: int, until_run: bool = False) -> None:
        """Execute `mesh` until it receives something not sent yet, or up to its next run."""
        program = self.schedule.programs[mesh]
        ready, produced = self.ready[mesh], self.produced[mesh]
        position, stop = self.position[mesh], len(program)
        while position < stop:
            instruction = program[position]
            kind = instruction.kind
            if kind == "run":
                if until_run:
                    break
                self._execute(mesh, position, instruction)
            elif kind == "free":
                self._free(mesh, instruction)
            elif kind == "send":
                peer = _peer(instruction, mesh, position)
                for name in instruction.inputs:
                    made = ready.get(name, 0.0)
                    if self.blocking:
                        made = max(made, self.clock[mesh])
                    start, end = self._send(mesh, peer, name, made)
                    if self.blocking:
                        self.exposed[mesh] += end - self.clock[mesh]
                        self.clock[mesh] = end
                    self.arrivals.setdefault((mesh, peer), deque()).append((name, made, end))
                    self.events[mesh].append((position, start, end))
            else:
                peer = _peer(instruction, mesh, position)
                arrived = self.arrivals.get((peer, mesh))
                if not arrived or len(arrived) < len(instruction.outputs):
                    break
                for name in instruction.outputs:
                    sent_name, made, end = arrived.popleft()
                    if sent_name != name:
                        raise ValueError(_mismatch(peer, mesh, sent_name, name))
                    ready[name], produced[name] = end, made
                    self._hold(mesh, name)
            position += 1
        self.position[mesh] = position

    def _execute(self, mesh: int, position: int, instruction: Instruction) -> None:
        ready, produced = self.ready[mesh], self.produced[mesh]
        free = start = unhidden = self.clock[mesh]
        for name in instruction.inputs:
            arrival = ready.get(name)
            if arrival is not None and arrival > unhidden:
                start = max(start, arrival)
                unhidden = max(unhidden, produced.get(name, 0.0))
        unhidden = max(free, min(unhidden, start))
        self.exposed[mesh] += start - unhidden
        end = start + self.seconds_of(mesh, instruction)
        self.record_run(mesh, position, instruction, start, end)

    def seconds_of(self, mesh: int, instruction: Instruction) -> float:
        """Return the stated seconds of a run."""
        seconds = self.task_seconds.get(instruction.task)
        if seconds is None:
            raise ValueError(
                f"task_seconds has no entry for task {instruction.task!r} of mesh {mesh}"
            )
        return seconds

    def record_run(
        self, mesh: int, position: int, instruction: Instruction, start: float, end: float
    ) -> None:
        """Note that a run took place: its time, its results, and its memory."""
        self.clock[mesh] = end
        self.busy[mesh] += end - start
        self.events[mesh].append((position, start, end))
        for name in instruction.outputs:
            self.ready[mesh][name] = self.produced[mesh][name] = end
            self._hold(mesh, name)
        if self.task_bytes:
            peak = self.live[mesh] + self.task_bytes.get(instruction.task, 0.0)
            if peak > self.peak[mesh]:
                self.peak[mesh] = peak

    def _send(self, source: int, target: int, name: str, made: float) -> tuple[float, float]:
        value = name.partition("@")[0]
        key = (source, target, value)
        seconds = self.transfer_cache.get(key)
        if seconds is None:
            seconds = self.transfer_cache[key] = self.transfer(source, target, value)
        channel = (source, target)
        start = max(made, self.channel_free.get(channel, 0.0))
        end = start + seconds
        self.channel_free[channel] = end
        self.sent[source] += seconds
        return start, end

    def _hold(self, mesh: int, name: str) -> None:
        if not self.value_bytes or name in self.held[mesh]:
            return
        size = self.value_bytes.get(name.partition("@")[0], 0.0)
        self.held[mesh][name] = size
        self.live[mesh] += size
        if self.live[mesh] > self.peak[mesh]:
            self.peak[mesh] = self.live[mesh]

    def _free(self, mesh: int, instruction: Instruction) -> None:
        for name in instruction.inputs:
            self.ready[mesh].pop(name, None)
            self.produced[mesh].pop(name, None)
            self.live[mesh] -= self.held[mesh].pop(name, 0.0)

    def deadlock(self, pending: Iterable[int]) -> str:
        """Return a message that names what the meshes wait for."""
        places = []
        for mesh in sorted(pending):
            if self.position[mesh] == len(self.schedule.programs[mesh]):
                continue
            instruction = self.schedule.programs[mesh][self.position[mesh]]
            names = ", ".join(instruction.inputs or instruction.outputs)
            places.append(
                f"mesh {mesh} waits at instruction {self.position[mesh]} "
                f"({instruction.kind} {names}, mesh {instruction.peer})"
            )
        return f"schedule {self.schedule.name!r} never ends: " + "; ".join(places[:8])

    def summary(self) -> Simulation:
        """Return what was recorded, once all programs have ended."""
        last = [max((event[2] for event in events), default=0.0) for events in self.events]
        step = max(last, default=0.0)
        timelines = []
        for events in self.events:
            table = np.array(events, dtype=float).reshape(-1, 3)
            timelines.append(
                Timeline(
                    instructions=table[:, 0].astype(np.int64),
                    starts=table[:, 1],
                    stops=table[:, 2],
                )
            )
        return Simulation(
            step_seconds=step,
            timelines=tuple(timelines),
            busy_seconds=tuple(self.busy),
            bubble_seconds=tuple(step - busy for busy in self.busy),
            exposed_seconds=tuple(self.exposed),
            transfer_seconds=tuple(self.sent),
            peak_bytes=tuple(self.peak),
            schedule=self.schedule,
        )


def _peer(instruction: Instruction, mesh: int, position: int) -> int:
    if instruction.peer is None:
        raise ValueError(
            f"instruction {position} of mesh {mesh} is a {instruction.kind} and must name its peer"
        )
    return instruction.peer


def _mismatch(source: int, target: int, sent: str, expected: str) -> str:
    return (
        f"sends and receives must match in order: mesh {source} sends {sent} when mesh {target} "
        f"receives {expected}"
    )
