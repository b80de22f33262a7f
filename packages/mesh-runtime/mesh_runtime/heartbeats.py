"""Which worker is alive, and what each is doing: asked beside the work, in a thread of its own.

A worker that is stopped, or whose node hangs, answers nothing, while those that wait for it answer
and say so. So the one that failed is told from those that only suffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field, frozen

from alpa_interchange.schedule import Instruction
from mesh_runtime.order import describe


@frozen(kw_only=True)
class Progress:
    """What a worker is doing: an instruction of a step, or nothing (`position` is -1).

    `peer` is the worker whose message it waits for, if it does; `seconds` since it began to.
    `busy` says whether it is doing what it was called for.
    """

    mesh: int
    host: int
    step: int = 0
    position: int = -1
    instruction: str = ""
    microbatch: int | None = None
    peer: str = ""
    seconds: float = 0.0
    busy: bool = False

    def __str__(self) -> str:
        if self.position < 0:
            return "is idle"
        what = f"is at {self.instruction} of step {self.step}"
        return f"{what}, waiting for {self.peer} for {self.seconds:.1f} s" if self.peer else what


@define
class Doing:
    """What one worker is doing, noted by the thread that does it and read by another."""

    mesh: int
    host: int
    _now: tuple[int, int, Instruction | None, str, float] = (0, -1, None, "", 0.0)

    def at(self, step: int, position: int, instruction: Instruction) -> None:
        """Note the instruction that begins."""
        self._now = (step, position, instruction, "", 0.0)

    def waiting(self, peer: str) -> None:
        """Note that a message of `peer` is waited for; "": it is there."""
        step, position, instruction, _, _ = self._now
        self._now = (step, position, instruction, peer, time.monotonic() if peer else 0.0)

    def nothing(self) -> None:
        """Note that no step is running."""
        self._now = (0, -1, None, "", 0.0)

    def progress(self) -> Progress:
        """Return what is being done."""
        step, position, instruction, peer, since = self._now
        if instruction is None:
            return Progress(mesh=self.mesh, host=self.host)
        return Progress(
            mesh=self.mesh,
            host=self.host,
            step=step,
            position=position,
            instruction=describe(self.mesh, position, instruction),
            microbatch=instruction.microbatch,
            peer=peer,
            seconds=time.monotonic() - since if peer else 0.0,
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

    def culprits(self, pending: Sequence[str]) -> list[str]:
        """Return, of workers that are not done, those that wait for no other; all if all wait."""
        waiting = [name for name in pending if name in self.last and self.last[name].peer]
        return [name for name in pending if name not in waiting] or list(pending)

    def described(self, names: Sequence[str]) -> str:
        """Return what workers said last, for an error."""
        return "; ".join(f"{name} {self.last[name]}" for name in names if name in self.last)
