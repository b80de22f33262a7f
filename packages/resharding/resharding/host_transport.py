"""Carries out plans between processes through the memory of their hosts.

A sender offers what it has; the receiver fetches it, straight into the tiles it makes, when it has
posted the receive and has room (`window`), so nothing arrives that nobody waits for. On one machine
a box of 1 MiB or more is written into the receiver's tile by the sender, which is told where, and a
smaller one is read out of the sender's memory: one copy. Between machines boxes come in chunks over
several connections, and a process in the middle of a broadcast passes on each chunk as it arrives.
Up to 64 KiB travel inside the offer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from alpa_interchange.reshard import ReshardingPlan
from alpa_interchange.tensor import dtype_bytes
from resharding.incoming import HostReceiving, Incoming
from resharding.outgoing import Outgoing, Shared
from resharding.regions import Bytes
from resharding.routes import Part, part_of
from resharding.socket_link import SocketLink
from resharding.sum_transport import SumParts, SumSending, parts_of_sum
from resharding.transport import Link, Sending, Tiles

_MOST_PARTS = 4096  # plans whose part is remembered: more than a schedule has


class HostTransport:
    """The end of one process, called `name`; all that share `token` may meet.

    `window` limits the bytes of receives that nobody waits for yet. With `checksum`, every box is
    sent with a CRC32 and checked. `link` replaces sockets.
    """

    def __init__(
        self,
        name: str,
        token: bytes,
        host: str = "127.0.0.1",
        *,
        link: Link | None = None,
        checksum: bool = False,
        window: int = 1 << 30,
    ) -> None:
        self.name = name
        self._owner_of: dict[int, str] = {}
        self._parts: dict[ReshardingPlan, Part] = {}
        self._sums: dict[ReshardingPlan, SumParts] = {}
        self._link: Link = SocketLink(name, token, host, checksum) if link is None else link
        self._shared = Shared(name, self._link, checksum)
        self._incoming = Incoming(self._shared, window)
        nothing = np.empty(0, np.uint8)
        self._outgoing = Outgoing(
            self._shared, lambda header: self._incoming.arrived(name, header, nothing)
        )
        self._incoming.pass_on_by(self._outgoing)
        self._link.open(self._arrived, self._lost, self._outgoing.supply)

    @property
    def address(self) -> Any:
        """Where the others find it."""
        return self._link.address

    def connect(self, peers: Mapping[str, Any], owner_of: Mapping[int, str]) -> None:
        """Learn where the others are, and which process owns each device."""
        self._owner_of = dict(owner_of)
        self._parts.clear()
        self._link.connect({peer: at for peer, at in peers.items() if peer != self.name})

    def send(self, key: str, plan: ReshardingPlan, tiles: Tiles, program: str = "") -> Sending:
        """Offer what this process's source devices have to send, or the sum of what they have."""
        sum_parts = self._sum_parts(plan)
        if sum_parts is not None:
            return SumSending(self, key, sum_parts, self._owner_of, tiles, program)
        return self._outgoing.send(key, self._part(plan), _width(plan), tiles, program)

    def receive(self, key: str, plan: ReshardingPlan, program: str = "") -> HostReceiving:
        """Post the receives of this process's target devices."""
        sum_parts = self._sum_parts(plan)
        plan = plan if sum_parts is None else sum_parts.moves
        return self._incoming.receive(key, self._part(plan), _width(plan), program)

    def close(self) -> None:
        """Give up all that is under way; whoever waits fails."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()
        self._outgoing.close()
        self._incoming.close()
        self._link.close()

    def _arrived(self, sender: str, header: dict[str, Any], payload: Bytes) -> None:
        if header["kind"] == "write":
            self._outgoing.write(sender, header)
            return
        if header["kind"] == "written":
            self._incoming.written(sender, header)
            return
        if header["kind"] != "fetched":
            self._incoming.arrived(sender, header, payload)
            return
        key, numbers = header["key"], [int(number) for number in header["numbers"]]
        self._outgoing.fetched(sender, key, numbers, int(header["inline"]))
        self._incoming.passed_on(key, numbers)

    def _lost(self, peer: str, reason: str) -> None:
        with self._shared.changed:
            self._shared.gone.setdefault(peer, reason)
            self._shared.changed.notify_all()
        self._outgoing.lose(peer, reason)

    def _part(self, plan: ReshardingPlan) -> Part:
        """Return what this process does for a plan, which is worked out once."""
        found = self._parts.get(plan)
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            found = self._parts[plan] = part_of(self.name, plan, self._owner_of)
        return found

    def _sum_parts(self, plan: ReshardingPlan) -> SumParts | None:
        """Return the parts of a plan with an unreduced source, which are worked out once."""
        if not plan.task.source.spec.partial:
            return None
        found = self._sums.get(plan)
        if found is None:
            if len(self._sums) >= _MOST_PARTS:
                self._sums.clear()
            found = self._sums[plan] = parts_of_sum(plan)
        return found


def _width(plan: ReshardingPlan) -> int:
    """Return the bytes of an element as arrays hold it."""
    return math.ceil(dtype_bytes(plan.task.tensor.dtype))
