"""Which worker is alive, and what each is doing: asked beside the work, in a thread of its own.

A worker that is stopped, or whose node hangs, answers nothing, while those that wait for it answer
and say so. So the one that failed is told from those that only suffer. Where both ends of a
transfer answer, and one has had it ready for as long as nothing of it came to the other, who waits,
the transfer is stalled: a run that takes long is told from that by its message not being ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field, frozen

from alpa_interchange.schedule import Instruction
from mesh_runtime.order import describe
from mesh_runtime.runtime import WorkerError
from mesh_runtime.transfers import Awaited, Receiving, Sending


@frozen(kw_only=True)
class Progress:
    """What a worker is doing: an instruction of a step, or nothing (`position` is -1).

    `peers` are the workers it waits for, if it does, `seconds` since it began to. `owed` are the
    messages that could come here, the workers that owe them, and the seconds in which nothing came;
    `offered` those that others could take here, and the seconds since one last did. `busy` says
    whether it is doing what it was called for.
    """

    mesh: int
    host: int
    step: int = 0
    position: int = -1
    instruction: str = ""
    microbatch: int | None = None
    peers: tuple[str, ...] = ()
    seconds: float = 0.0
    owed: Mapping[str, Awaited] = field(factory=dict)
    offered: Mapping[str, float] = field(factory=dict)
    busy: bool = False

    def __str__(self) -> str:
        if self.position < 0:
            return "is idle"
        what = f"is at {self.instruction} of step {self.step}"
        names = ", ".join(self.peers)
        return f"{what}, waiting for {names} for {self.seconds:.1f} s" if names else what


@frozen
class _Wait:
    """The transfer that a worker waits for, of which instruction, since when."""

    position: int
    instruction: Instruction
    transfer: Sending | Receiving
    since: float


@define
class Doing:
    """What one worker is doing, noted by the thread that does it and read by another."""

    mesh: int
    host: int
    _now: tuple[int, int, Instruction | None] = (0, -1, None)
    _wait: _Wait | None = None
    _sent: list[tuple[str, Sending]] = field(factory=list)
    _received: list[tuple[str, Receiving]] = field(factory=list)

    def at(self, step: int, position: int, instruction: Instruction) -> None:
        """Note the instruction that begins."""
        self._now = (step, position, instruction)

    @contextmanager
    def waiting(
        self,
        position: int,
        instruction: Instruction,
        transfer: Sending | Receiving,
    ) -> Iterator[None]:
        """Note, meanwhile, that the transfer of an instruction is waited for."""
        self._wait = _Wait(position, instruction, transfer, time.monotonic())
        yield
        self._wait = None

    def sent(self, message: str, sending: Sending) -> None:
        """Note a message that was given to the transport."""
        self._sent.append((message, sending))

    def receives(self, message: str, receiving: Receiving) -> None:
        """Note a message that the transport was asked for."""
        self._received.append((message, receiving))

    def nothing(self) -> None:
        """Note that no step is running."""
        self._now, self._wait, self._sent, self._received = (0, -1, None), None, [], []

    def progress(self) -> Progress:
        """Return what is being done."""
        (step, position, instruction), wait = self._now, self._wait
        if instruction is None:
            return Progress(mesh=self.mesh, host=self.host)
        peers: tuple[str, ...] = ()
        seconds = 0.0
        if wait is not None:
            position, instruction = wait.position, wait.instruction
            peers = wait.transfer.awaited()[0] or (f"mesh {instruction.peer}",)
            seconds = time.monotonic() - wait.since
        owed = {key: one.awaited() for key, one in list(self._received)}
        offered = {key: one.awaited() for key, one in list(self._sent)}
        return Progress(
            mesh=self.mesh,
            host=self.host,
            step=step,
            position=position,
            instruction=describe(self.mesh, position, instruction),
            microbatch=instruction.microbatch,
            peers=peers,
            seconds=seconds,
            owed={key: found for key, found in owed.items() if found[0]},
            offered={key: since for key, (takers, since) in offered.items() if takers},
        )


@define
class Heartbeats:
    """The answers of workers while a call is under way.

    `ask(name)` begins to ask a worker and returns a reference, which the caller waits for with its
    own. A worker is late when it has not answered for `timeout` seconds.
    """

    names: Sequence[str]
    ask: Callable[[str], Any]
    interval: float
    timeout: float
    last: dict[str, Progress] = field(factory=dict, init=False)
    _heard: dict[str, float] = field(factory=dict, init=False)
    _asked: dict[Any, str] = field(factory=dict, init=False)
    _next: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        now = time.monotonic()
        self._heard = dict.fromkeys(self.names, now)
        self._next = now + self.interval

    def references(self) -> list[Any]:
        """Return what is waited for; ask again those that have answered, if it is time."""
        now = time.monotonic()
        if now >= self._next:
            waiting = set(self._asked.values())
            for name in self.names:
                if name not in waiting:
                    self._asked[self.ask(name)] = name
            self._next = now + self.interval
        return list(self._asked)

    def seconds_left(self) -> float:
        """Return the seconds until it is time to look again."""
        return max(0.0, self._next - time.monotonic())

    def answered(self, reference: Any, get: Callable[[Any], Progress]) -> bool:
        """Take in what has come by a reference, if it is one of these; return whether it is."""
        name = self._asked.pop(reference, None)
        if name is None:
            return False
        try:
            self.last[name] = get(reference)
        except Exception:  # a worker that died: its call, which is under way as well, says so
            return True
        self._heard[name] = time.monotonic()
        return True

    def idle_after(self, name: str, moment: float) -> bool:
        """Return whether a worker has said since a moment that it is not at work."""
        return self._heard[name] > moment and name in self.last and not self.last[name].busy

    def late(self) -> list[str]:
        """Return the workers that have not answered for too long."""
        now = time.monotonic()
        return [name for name in self.names if now - self._heard[name] > self.timeout]

    def stalled(self) -> str:
        """Return which transfer has not moved for too long and between whom, for an error; "" if
        none. It is found within `timeout`, as answers are an interval apart."""
        patience = max(self.timeout - self.interval, self.timeout / 2)
        for name, found in self.last.items():
            for message, (peers, quiet) in found.owed.items():
                others = [one for one in peers if one in self.last and quiet > patience]
                for peer in others:
                    if _has_ready(self.last[peer], name, message) > patience:
                        return (
                            f"the transfer of {message} is stalled: {name} is at "
                            f"{found.instruction}, and nothing has come for {quiet:.1f} s from "
                            f"{peer}, which has it ready"
                        )
        return ""

    def no_answer(self, what: str, late: Sequence[str], when: str) -> WorkerError:
        """Return the error of workers that did not answer; it says what the others wait for."""
        others = self.described([name for name in self.names if name not in late])
        said = self.described(late)
        last = f"; it said last that {said}" if said else ""
        rest = f". Meanwhile {others}" if others else ""
        return WorkerError(f"{what}: no answer from {', '.join(late)} {when}{last}{rest}")

    def culprits(self, pending: Sequence[str]) -> list[str]:
        """Return, of workers that are not done, those that wait for no other; all if all wait."""
        waiting = [name for name in pending if name in self.last and self.last[name].peers]
        return [name for name in pending if name not in waiting] or list(pending)

    def described(self, names: Sequence[str]) -> str:
        """Return what workers said last, for an error."""
        return "; ".join(f"{name} {self.last[name]}" for name in names if name in self.last)


def _has_ready(found: Progress, receiver: str, message: str) -> float:
    """Return for how many seconds a worker has had a message ready, its own or one that it passes
    on: then each end waits for the other."""
    peers, quiet = found.owed.get(message, ((), 0.0))
    return quiet if receiver in peers else found.offered.get(message, 0.0)
