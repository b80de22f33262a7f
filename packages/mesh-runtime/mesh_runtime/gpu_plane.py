"""Values that go from mesh to mesh without the memory of hosts: the worker's end, handed in.

The package `resharding` has one, `resharding.gpu_transport.GpuTransport`, over NCCL. It is used
where every worker can; else values go through the memory of hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from mesh_runtime.transfers import Channel

GpuPair: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bytes]
"""The devices of a mesh that sends, those of one that receives, and the name of what joins them."""


class GpuTransport(Channel, Protocol):
    """One worker's end; tiles are jax arrays, also those that are still being computed."""

    def connect(self, pairs: Sequence[GpuPair], owner_of: Mapping[int, str]) -> None:
        """Meet the others of new pairs of meshes; all workers do so at the same time."""
        ...


class GpuTransportMaker(Protocol):
    """Makes a worker's end; importable in its process."""

    def obstacle(self) -> str:
        """Return why this process cannot use it; "" if it can."""
        ...

    def new_identity(self) -> bytes:
        """Return what the workers of a new pair of meshes know each other by."""
        ...

    def __call__(self, name: str, devices: Mapping[int, Any], timeout: float) -> GpuTransport:
        """Return the end called `name` of this process's devices, by number."""
        ...


class GpuPlane:
    """A worker's part: its devices by number, and its end once a plan sends values."""

    def __init__(self, name: str, maker: GpuTransportMaker | None, devices: Mapping[int, Any]):
        self._name, self._maker, self._devices = name, maker, dict(devices)
        self.transport: GpuTransport | None = None

    def obstacle(self) -> str:
        """Return why values cannot go from GPU to GPU here; "" if they can."""
        platforms = sorted({device.platform for device in self._devices.values()} - {"gpu"})
        if platforms:
            return f"{self._name} has {', '.join(platforms)} devices"
        if self._maker is None:
            return "no transport between GPUs was handed in"
        reason = self._maker.obstacle()
        return f"{self._name}: {reason}" if reason else ""

    def identities(self, count: int) -> list[bytes]:
        """Return what the workers of `count` pairs of meshes know each other by."""
        assert self._maker is not None
        return [self._maker.new_identity() for _ in range(count)]

    def connect(
        self, pairs: Sequence[GpuPair], owner_of: Mapping[int, str], timeout: float
    ) -> None:
        """Meet the workers of new pairs of meshes."""
        if self.transport is None:
            assert self._maker is not None
            self.transport = self._maker(self._name, self._devices, timeout)
        self.transport.connect(pairs, owner_of)

    def close(self) -> None:
        """Give up all that is under way."""
        if self.transport is not None:
            self.transport.close()
