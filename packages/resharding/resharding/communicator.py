"""The few operations an executor needs from a message layer with NCCL's matching rules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Communicator(Protocol):
    """One rank of a group of `size` processes or threads.

    Operations of a rank happen in the order they are issued; those inside one `group()` happen
    together. The k-th send of rank a to rank b matches the k-th receive of b from a, and both must
    have the same number of bytes. Buffers are contiguous one-dimensional arrays of bytes in the
    memory the layer works on; `label` says in errors what an operation belongs to.
    """

    rank: int
    size: int

    def group(self) -> AbstractContextManager[None]:
        """Return a context whose sends and receives are issued together when it ends."""
        ...

    def send(self, buffer: Any, peer: int, label: str) -> None:
        """Send `buffer` to rank `peer`."""
        ...

    def receive(self, buffer: Any, peer: int, label: str) -> None:
        """Fill `buffer` with what rank `peer` sends."""
        ...
