"""What carries out plans between processes: sends and receives are posted, futures tell the end.

Every process that owns devices of a plan posts its part under one key: those that own source
devices `send`, those that own target devices `receive`, in any order. What a process passes on to
others is part of its receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from alpa_interchange.reshard import ReshardingPlan
from resharding.regions import Bytes, Region, Runs

Tiles: TypeAlias = Callable[[], Mapping[int, NDArray[Any]]]
"""Returns the tile of every source device of this process, as contiguous arrays that stay as they
are while something refers to them; it is called once, in a thread of the transport."""


Awaited: TypeAlias = tuple[tuple[str, ...], float]
"""The peers that a transfer waits for, and for how many seconds nothing of it has moved; no peers
where it waits for none, or the transport does not know."""


class TransportError(RuntimeError):
    """A transfer did not end; the message names the tensor (the key) and the peers."""


class Sending(Protocol):
    """A send under way."""

    def taken(self, timeout: float) -> None:
        """Wait until the tiles are in the transport's hands: their arrays may be given away."""
        ...

    def result(self, timeout: float) -> None:
        """Wait until all peers have what they need."""
        ...

    def awaited(self) -> Awaited:
        """Return the peers that have yet to take what is there, from any thread."""
        ...


class Receiving(Protocol):
    """A receive under way."""

    def result(self, timeout: float) -> Mapping[int, Bytes]:
        """Wait for the tile of every target device of this process, its elements as bytes.

        Devices with the same tile share the memory, which nobody else writes to.
        """
        ...

    def awaited(self) -> Awaited:
        """Return the peers that have yet to send, where somebody waits for it, from any thread."""
        ...

    def cancel(self) -> None:
        """Give up; what arrives later is dropped."""
        ...


class Transport(Protocol):
    """One process's end, named as the others know it."""

    name: str

    @property
    def address(self) -> Any:
        """What the others need to reach it: plain data."""
        ...

    def connect(self, peers: Mapping[str, Any], owner_of: Mapping[int, str]) -> None:
        """Learn the addresses of the others, and which process owns each device."""
        ...

    def send(self, key: str, plan: ReshardingPlan, tiles: Tiles, program: str = "") -> Sending:
        """Post the sends of this process's source devices; all sides must name one `program`."""
        ...

    def receive(self, key: str, plan: ReshardingPlan, program: str = "") -> Receiving:
        """Post the receives of this process's target devices."""
        ...

    def close(self) -> None:
        """Give up all that is under way."""
        ...


class Link(Protocol):
    """How messages and the memory of tiles get from one process to another."""

    @property
    def most_inline(self) -> int | None:
        """Bytes that travel inside a message instead of being fetched; None: all, nothing is."""
        ...

    @property
    def address(self) -> Any:
        """What the others need to reach it."""
        ...

    def open(self, arrived: Arrived, lost: Lost, supply: Supply) -> None:
        """Begin; the functions are called from threads of the link."""
        ...

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Learn the addresses of the others."""
        ...

    def post(
        self,
        peer: str,
        header: dict[str, Any],
        payload: Bytes | None = None,
        later: bool = False,
    ) -> None:
        """Send a message behind the earlier ones, without waiting for it; `lost` tells failures.
        One that may go `later` may be kept for a moment, to go with the next one."""
        ...

    def flush(self) -> None:
        """Send what may go later."""
        ...

    def lanes(self, peer: str) -> int:
        """Return how many fetches from a peer pay off at a time."""
        ...

    def reads(self, peer: str) -> bool:
        """Return whether the memory of a peer can be read without its help."""
        ...

    def shares(self, peer: str) -> bool:
        """Return whether this process and a peer can map each other's files."""
        ...

    def mapped(self, peer: str, number: int, file: int, size: int) -> Bytes:
        """Return the memory of a peer's file; `number` is one that it never uses again."""
        ...

    def read(
        self, peer: str, address: int, runs: Runs, region: Region, begin: int, end: int
    ) -> None:
        """Fill bytes `begin` to `end` of `region` from where the peer has the same box."""
        ...

    def fetch(
        self, peer: str, key: str, number: int, begin: int, views: Sequence[memoryview]
    ) -> None:
        """Fill `views` with what the peer has of box `number` under `key`, from byte `begin`."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


Arrived: TypeAlias = Callable[[str, dict[str, Any], Bytes], None]  # sender, header, payload
Lost: TypeAlias = Callable[[str, str], None]  # peer, why
Supply: TypeAlias = Callable[[str, str, int, int, int], Iterator[memoryview]]
"""Yields bytes `begin` to `end` of a box that a peer fetches (peer, key, number, begin, end), when
they are there."""
