"""NCCL through CuPy, with what differs between versions of CuPy and what it gets wrong.

* Unique ids are bytes from CuPy 14 on; before, they are tuples of *signed* chars, and an id with a
  byte above 127 is refused if it is not written so.
* `NcclError` knows the statuses 0 to 5. NCCL's "remote error" (6: a peer has died) and "in
  progress" (7) raise a `KeyError` while it is made.
* `NcclCommunicator(...)` waits for all ranks with Python's lock held, so the ranks of one process
  are made inside one group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from resharding.transport import TransportError

ID_BYTES = 128
_REMOTE_ERROR, _IN_PROGRESS = 6, 7
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def unique_id() -> bytes:
    """Return a new id: the communicators that are made with it belong together."""
    from cupy.cuda import nccl

    made = nccl.get_unique_id()
    return made if isinstance(made, bytes) else bytes(value & 0xFF for value in made)


def as_cupy_id(identity: bytes, version: str) -> Any:
    """Return an id in the form in which a version of CuPy takes it."""
    if len(identity) != ID_BYTES:
        raise ValueError(f"an id has {ID_BYTES} bytes, got {len(identity)}")
    if int(version.split(".")[0]) >= 14:
        return identity
    return tuple(value - 256 if value > 127 else value for value in identity)


class Operation:
    """A send (or receive) of `nbytes` at `pointer` between `rank`, which is here, and `peer`."""

    __slots__ = ("nbytes", "peer", "pointer", "rank", "sends")

    def __init__(self, sends: bool, rank: int, peer: int, pointer: int, nbytes: int) -> None:
        self.sends, self.rank, self.peer = sends, rank, peer
        self.pointer, self.nbytes = pointer, nbytes


class NcclRanks:
    """The ranks of one communicator that this process has, by CUDA device index, and their streams.

    All processes of the communicator make theirs at the same time; a process that is in several
    makes them in the order of `key`s that all agree on.
    """

    def __init__(self, key: str, identity: bytes, size: int, ranks: Mapping[int, int]) -> None:
        # Communicators that run side by side start in the order in which they were issued, also
        # beside those of XLA, if the library is the same one (NCCL 2.26 and later).
        os.environ.setdefault(_LAUNCH_ORDER, "1")
        import cupy
        from cupy.cuda import nccl

        self.key, self._cupy, self._nccl = key, cupy, nccl
        self._aborted = False
        self.device_of = dict(ranks)
        form = as_cupy_id(identity, cupy.__version__)
        self.streams: dict[int, Any] = {}
        self._communicators: dict[int, Any] = {}
        with self._group("making its communicators"):
            for rank, device in sorted(ranks.items()):
                with cupy.cuda.Device(device):
                    self.streams[rank] = cupy.cuda.Stream(non_blocking=True)
                    made = nccl.NcclCommunicator(size, form, rank)
                self._communicators[rank] = made

    def issue(self, operations: Sequence[Operation], label: str) -> None:
        """Start sends and receives of ranks here, together; the streams do the rest."""
        with self._group(label):
            for each in operations:
                communicator, stream = self._communicators[each.rank], self.streams[each.rank]
                call = communicator.send if each.sends else communicator.recv
                with self._cupy.cuda.Device(self.device_of[each.rank]):
                    call(each.pointer, each.nbytes, self._nccl.NCCL_UINT8, each.peer, stream.ptr)

    def event(self, rank: int) -> Any:
        """Return an event that is done when all that a rank was given so far is."""
        with self._cupy.cuda.Device(self.device_of[rank]):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self.streams[rank])
        return event

    def check(self) -> None:
        """Raise TransportError if NCCL has noticed a failure."""
        for communicator in self._communicators.values():
            with self._named("what was under way"):
                communicator.check_async_error()

    def abort(self) -> None:
        """Give up all that is under way on these ranks; they cannot be used afterwards."""
        if self._aborted:
            return
        self._aborted = True
        for rank, communicator in self._communicators.items():
            with self._cupy.cuda.Device(self.device_of[rank]):
                try:
                    communicator.abort()
                except Exception:  # it is given up, whatever it says
                    continue

    @contextmanager
    def _group(self, label: str) -> Iterator[None]:
        """Issue what is inside as one NCCL group; half a group is never left to run."""
        if self._aborted:
            raise TransportError(f"{label}: the communicator of {self.key} was given up")
        with self._named(label):
            self._nccl.groupStart()
            try:
                yield
            except BaseException:
                try:
                    self._nccl.groupEnd()  # NCCL counts groups; what this one started is aborted
                finally:
                    self.abort()
                raise
            self._nccl.groupEnd()

    @contextmanager
    def _named(self, label: str) -> Iterator[None]:
        """Turn NCCL's errors into TransportError, also those that CuPy does not know."""
        try:
            yield
        except KeyError as error:
            status = error.args[0] if error.args else None
            if status == _IN_PROGRESS:
                return
            what = "a peer has gone" if status == _REMOTE_ERROR else f"status {status}"
            raise TransportError(f"NCCL failed at {label} ({self.key}): {what}") from error
        except self._nccl.NcclError as error:
            raise TransportError(f"NCCL failed at {label} ({self.key}): {error}") from error
