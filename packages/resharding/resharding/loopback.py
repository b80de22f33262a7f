"""A message layer inside one process: NCCL's matching rules between threads, on numpy memory.

Sends wait for their receives (there is no buffering), operations of one rank happen in issue order,
grouped ones together. An operation that finds no partner in time ends with an error that lists what
every rank was waiting for, where NCCL would hang: a plan that passes here issues in a legal order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class CommunicationError(RuntimeError):
    """A send and a receive do not match, or waited too long; the message lists the blocked ones."""


@define(eq=False)
class _Operation:
    kind: str  # "send" | "receive"
    rank: int
    peer: int
    buffer: Bytes
    label: str
    done: bool = False

    def __str__(self) -> str:
        way = "to" if self.kind == "send" else "from"
        return (
            f"rank {self.rank} {self.kind} of {self.buffer.nbytes} bytes {way} rank {self.peer} "
            f"({self.label})"
        )


@define
class _Wire:
    """Posted and unmatched operations from one rank to another."""

    sends: list[_Operation] = field(factory=list)
    receives: list[_Operation] = field(factory=list)


class LoopbackWorld:
    """`size` ranks that exchange bytes; one thread per rank, `timeout` in seconds per operation."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size, self.timeout = size, timeout
        self.num_bytes = 0  # carried in all
        self._wires: dict[tuple[int, int], _Wire] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None

    def communicator(self, rank: int) -> LoopbackCommunicator:
        """Return the communicator of `rank`."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1}, got {rank}")
        return LoopbackCommunicator(self, rank)

    def exchange(self, operations: list[_Operation]) -> None:
        """Post operations together and wait until all of them are done."""
        with self._changed:
            for operation in operations:
                self._post(operation)
            self._changed.notify_all()
            arrived = self._changed.wait_for(
                lambda: self._failure is not None or all(each.done for each in operations),
                self.timeout,
            )
            if not arrived:
                blocked = [
                    str(each)
                    for wire in self._wires.values()
                    for each in (*wire.sends, *wire.receives)
                ]
                self._failure = f"no partner within {self.timeout} s; blocked are: " + "; ".join(
                    blocked
                )
                self._changed.notify_all()
            if self._failure is not None and not all(each.done for each in operations):
                raise CommunicationError(self._failure)

    def _post(self, operation: _Operation) -> None:
        sending = operation.kind == "send"
        ends = (operation.rank, operation.peer) if sending else (operation.peer, operation.rank)
        wire = self._wires.setdefault(ends, _Wire())
        (wire.sends if sending else wire.receives).append(operation)
        while wire.sends and wire.receives and self._failure is None:
            source, target = wire.sends[0], wire.receives[0]
            if source.buffer.nbytes != target.buffer.nbytes:
                self._failure = f"sizes differ: {source} meets {target}"
                return
            target.buffer[:] = source.buffer
            self.num_bytes += source.buffer.nbytes
            source.done = target.done = True
            del wire.sends[0], wire.receives[0]


class LoopbackCommunicator:
    """One rank of a `LoopbackWorld`; follows `Communicator`."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world = world
        self._grouped: list[_Operation] | None = None

    @contextmanager
    def group(self) -> Iterator[None]:
        """Issue the operations inside together when the context ends."""
        if self._grouped is not None:
            raise RuntimeError("groups may not be nested")
        self._grouped = []
        try:
            yield
            operations = self._grouped
        finally:
            self._grouped = None
        if operations:
            self._world.exchange(operations)

    def send(self, buffer: Bytes, peer: int, label: str) -> None:
        """Send `buffer` to rank `peer` and wait until it has it."""
        self._issue(_Operation("send", self.rank, peer, buffer, label))

    def receive(self, buffer: Bytes, peer: int, label: str) -> None:
        """Wait for the bytes rank `peer` sends and put them into `buffer`."""
        self._issue(_Operation("receive", self.rank, peer, buffer, label))

    def _issue(self, operation: _Operation) -> None:
        if not 0 <= operation.peer < self.size or operation.peer == self.rank:
            raise ValueError(f"{operation}: the peer must be another of the {self.size} ranks")
        if self._grouped is None:
            self._world.exchange([operation])
        else:
            self._grouped.append(operation)
