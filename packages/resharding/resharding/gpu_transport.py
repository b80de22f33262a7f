"""A worker's end between GPUs of several processes, made of jax arrays and NCCL.

It follows the calls of `HostTransport`, with arrays in the place of bytes. Receives of one pair of
meshes are given to NCCL in the order they are posted, a few ahead of the one that is used next:
each takes memory from then on, and a step posts all of its receives when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

from alpa_interchange.reshard import ReshardingPlan
from resharding.nccl_library import unique_id
from resharding.nccl_transport import (
    DeviceMemory,
    NcclPair,
    NcclReceiving,
    NcclSending,
    NcclTransport,
)
from resharding.transport import Awaited

AHEAD = 2
"""Receives of a pair of meshes that NCCL has been given and nobody has used yet: while one is
computed with, the next can arrive, as in a schedule that receives early."""
Ends: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # devices of the source, of the target


class GpuTransport:
    """The end called `name`; `devices` are those of this process by the numbers of plans.

    A transfer may take `timeout` seconds. `memory` stands for that of jax in tests.
    """

    def __init__(
        self,
        name: str,
        devices: Mapping[int, Any],
        timeout: float,
        memory: DeviceMemory | None = None,
    ) -> None:
        if memory is None:
            from resharding.jax_memory import JaxMemory

            memory = JaxMemory(devices)
        self._nccl = NcclTransport(name, list(devices), memory, timeout=timeout)
        self._waiting: dict[Ends, deque[GpuReceiving]] = {}  # not yet given to NCCL
        self._unused: dict[Ends, int] = {}

    @staticmethod
    def obstacle() -> str:
        """Return why this process cannot use NCCL; "" if it can."""
        if find_spec("cupy") is None:
            return "CuPy is not installed (pip install 'resharding[nccl]')"
        from cupy.cuda import nccl

        return "" if getattr(nccl, "available", True) else "CuPy was made without NCCL"

    @staticmethod
    def new_identity() -> bytes:
        """Return what the ends of a new pair of meshes know each other by; this process must stay
        until all have connected."""
        return unique_id()

    def connect(
        self,
        pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...], bytes]],
        owner_of: Mapping[int, str],
    ) -> None:
        """Meet the others of each new (source devices, target devices, identity): all processes do
        so at the same time, with the same pairs."""
        self._nccl.connect([NcclPair(*pair) for pair in pairs], owner_of)

    def send(
        self,
        key: str,
        plan: ReshardingPlan,
        tiles: Callable[[], Mapping[int, Any]],
        program: str = "",
    ) -> NcclSending:
        """Post the sends of the devices here; `tiles()` are their arrays, computed or not yet."""
        return self._nccl.send(key, plan, tiles, program)

    def receive(self, key: str, plan: ReshardingPlan, program: str = "") -> GpuReceiving:
        """Post the receives of the devices here."""
        ends = plan.task.source.devices, plan.task.target.devices
        receiving = GpuReceiving(self, ends, lambda: self._nccl.receive(key, plan, program))
        self._waiting.setdefault(ends, deque()).append(receiving)
        self._advance(ends)
        return receiving

    def close(self) -> None:
        """Give up all that is under way."""
        self._nccl.close()

    def use(self, receiving: GpuReceiving) -> NcclReceiving:
        """Return what a receive became; the next one of its pair takes its place."""
        while receiving.begun is None:
            self._begin(receiving.ends)
        if not receiving.used:
            receiving.used = True
            self._unused[receiving.ends] -= 1
            self._advance(receiving.ends)
        return receiving.begun

    def forget(self, receiving: GpuReceiving) -> None:
        """Give up a receive."""
        if receiving.begun is None:
            self._waiting[receiving.ends].remove(receiving)
        elif not receiving.used:
            receiving.begun.cancel()

    def _advance(self, ends: Ends) -> None:
        while self._waiting[ends] and self._unused.get(ends, 0) < AHEAD:
            self._begin(ends)

    def _begin(self, ends: Ends) -> None:
        first = self._waiting[ends].popleft()
        self._unused[ends] = self._unused.get(ends, 0) + 1
        first.begun = first.begin()


class GpuReceiving:
    """A receive that NCCL is given when it is its turn; see `resharding.transport.Receiving`."""

    def __init__(self, owner: GpuTransport, ends: Ends, begin: Callable[[], NcclReceiving]) -> None:
        self._owner, self.ends, self.begin = owner, ends, begin
        self.begun: NcclReceiving | None = None
        self.used = False

    def result(self, timeout: float) -> Mapping[int, Any]:
        """Return the tile of every target device here; programs that read them wait by events."""
        return self._owner.use(self).result(timeout)

    def awaited(self) -> Awaited:
        """Return the peers that have yet to send, once NCCL has been given the receive."""
        return ((), 0.0) if self.begun is None else self.begun.awaited()

    def cancel(self) -> None:
        """Give up, unless it has been used: then its memory is the user's."""
        self._owner.forget(self)
