"""When each transfer of a plan starts and ends, in a fluid model of the network.

* copy: one flow of D bytes.
* broadcast: a chain; all hops run at one rate. After the D bytes it takes the fill time
  sum_h c/b_h - max_h c/b_h (c = D/K bytes per chunk, b_h the uncontended rate of hop h).
* gather: a ring over n devices; every edge carries D less what the device that owns least of it
  has, D (n-1)/n where all have as much.
* local: nothing.
* latency: (K + H - 1) per chain of H hops and K chunks, n - 1 per ring, 1 per copy.

Flows that run at once share each port (a card or a device, in one direction) max-min fairly. A
transfer starts when all of `after` are done and, by the issue model of the network, every earlier
transfer of its hosts ("host") or devices ("device") is done. Those of `after` that leave the host
of its sender, and bring its sender nothing, only go first: it starts when their bytes have left,
without waiting for them to arrive.                                               -> goes_first()
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen

from alpa_interchange.reshard import Transfer
from resharding.coverage import PlanError
from resharding.fluid import Fluid
from resharding.network import Links
from resharding.traffic import edge_bytes, edges

_SENT_BY_ONE = ("copy", "broadcast")


class Watcher(Protocol):
    """Is told of every start and end, in the order in which they happen."""

    def check_start(self, index: int, transfer: Transfer) -> None:
        """Transfer `index` starts."""
        ...

    def finish(self, transfer: Transfer) -> None:
        """The bytes of `transfer` are there."""
        ...


@frozen
class Demand:
    """What one transfer asks of the network."""

    num_bytes: float
    ports: tuple[int, ...]  # distinct
    times: tuple[int, ...]  # how often it passes through each port
    tail: float  # seconds after its bytes have passed
    alone: float  # bytes/s with the network to itself


def demand_of(
    transfer: Transfer, element_bytes: float, links: Links, transfers: Sequence[Transfer]
) -> Demand:
    """Return what `transfer`, one of `transfers`, asks of the network."""
    pairs = edges(transfer)
    if not pairs:
        return Demand(0.0, (), (), 0.0, math.inf)
    latency, amount = links.network.latency, edge_bytes(transfer, element_bytes, transfers)
    if len(pairs) == 1:
        ports = links.ports(*pairs[0])
        alone = min([links.rate[port] for port in ports])
        return Demand(amount, ports, (1,) * len(ports), latency, alone)
    used: dict[int, int] = {}
    rates: list[float] = []
    for a, b in pairs:
        hop = links.ports(a, b)
        rates.append(min([links.rate[port] for port in hop]))
        for port in hop:
            used[port] = used.get(port, 0) + 1
    if transfer.method == "gather":
        tail = latency * (len(pairs) - 1)
    else:
        fills = [amount / transfer.num_chunks / rate for rate in rates]
        tail = sum(fills) - max(fills) + latency * (transfer.num_chunks + len(pairs) - 1)
    alone = min(links.rate[port] / times for port, times in used.items())
    return Demand(amount, tuple(used), tuple(used.values()), tail, alone)


def least_seconds(transfers: Sequence[Transfer], demands: Sequence[Demand], links: Links) -> float:
    """Return the time of the busiest port, host or device, were none of them ever to wait, or of
    the longest row of transfers that wait for one another."""
    carried = [0.0] * len(links.rate)
    blocked: dict[int, float] = {}
    ends: list[float] = []
    for transfer, demand in zip(transfers, demands, strict=True):
        for port, times in zip(demand.ports, demand.times, strict=True):
            carried[port] += demand.num_bytes * times
        alone = demand.num_bytes / demand.alone + demand.tail
        before = [
            ends[k] - demands[k].tail * goes_first(transfers[k], transfer, links.host_of)
            for k in transfer.after
            if k < len(ends)
        ]
        ends.append(alone + max(before, default=0.0))
        for lane in lanes_of(transfer, links):
            blocked[lane] = blocked.get(lane, 0.0) + alone
    ports = max((amount / links.rate[port] for port, amount in enumerate(carried)), default=0.0)
    return max(ports, max(ends, default=0.0), max(blocked.values(), default=0.0))


def level_seconds(transfers: Sequence[Transfer], demands: Sequence[Demand], links: Links) -> float:
    """Return the time of transfers level by level: those that wait for none to arrive, those that
    wait for them, ...; a level takes what its busiest port does, and its longest tail."""
    level_of: list[int] = []
    carried: list[dict[int, float]] = []
    tails: list[float] = []
    for transfer, demand in zip(transfers, demands, strict=True):
        before = [(k, goes_first(transfers[k], transfer, links.host_of)) for k in transfer.after]
        level = max((level_of[k] + (not first) for k, first in before), default=0)
        level_of.append(level)
        if level == len(tails):
            carried.append({})
            tails.append(0.0)
        tails[level] = max(tails[level], demand.tail)
        for port, times in zip(demand.ports, demand.times, strict=True):
            carried[level][port] = carried[level].get(port, 0.0) + demand.num_bytes * times
    return sum(tails) + sum(
        max((amount / links.rate[port] for port, amount in each.items()), default=0.0)
        for each in carried
    )


def goes_first(earlier: Transfer, later: Transfer, host_of: Mapping[int, int]) -> bool:
    """Return whether `later`, which names `earlier`, waits only for its bytes to leave their host.

    Whoever sends both knows when that is: `HostTransport` has then written or served them, and in
    the streams of NCCL the next send follows.
    """
    return (
        earlier.method in _SENT_BY_ONE
        and later.method in _SENT_BY_ONE
        and later.sender not in earlier.receivers
        and host_of[later.sender] == host_of[earlier.sender]
    )


def lanes_of(transfer: Transfer, links: Links) -> tuple[int, ...]:
    """Return the hosts or devices in whose order the transfer stands."""
    issue = links.network.issue
    if issue == "none" or transfer.method == "local":
        return ()
    devices = dict.fromkeys((transfer.sender, *transfer.receivers))
    if issue == "device":
        return tuple(devices)
    return tuple(dict.fromkeys(links.host_of[device] for device in devices))


def course(
    transfers: Sequence[Transfer],
    demands: Sequence[Demand],
    links: Links,
    watcher: Watcher | None = None,
    limit: float = math.inf,
) -> tuple[tuple[float, float], ...]:
    """Return (start, end) of every transfer; PlanError if some wait for each other for ever.

    What has not ended by `limit` seconds is not followed further: its end is inf.
    """
    return _Course(transfers, demands, links, watcher).run(limit)


class _Course:
    def __init__(
        self,
        transfers: Sequence[Transfer],
        demands: Sequence[Demand],
        links: Links,
        watcher: Watcher | None,
    ) -> None:
        self.transfers, self.demands = transfers, demands
        self.links, self.watcher = links, watcher
        self.queues: dict[int, list[int]] = {}
        self.lanes = [lanes_of(transfer, links) for transfer in transfers]
        self.waits = [0] * len(transfers)  # lanes where others are before it, and `after`
        self.dependents: list[list[int]] = [[] for _ in transfers]
        self.followers: list[list[int]] = [[] for _ in transfers]  # start when it has left
        for index, transfer in enumerate(transfers):
            for lane in self.lanes[index]:
                queue = self.queues.setdefault(lane, [])
                self.waits[index] += bool(queue)
                queue.append(index)
            for earlier in transfer.after:
                if not 0 <= earlier < len(transfers):
                    raise PlanError(f"transfer {index} waits for transfer {earlier}, which is none")
                first = goes_first(transfers[earlier], transfer, links.host_of)
                first = first and demands[earlier].num_bytes > 0
                (self.followers if first else self.dependents)[earlier].append(index)
                self.waits[index] += 1
        self.heads = dict.fromkeys(self.queues, 0)

    def run(self, limit: float) -> tuple[tuple[float, float], ...]:
        """Advance from event to event until every transfer is done."""
        now, count = 0.0, len(self.transfers)
        ready = [index for index, waits in enumerate(self.waits) if not waits]
        fluid = Fluid(self.demands, self.links)
        tails: list[tuple[float, int]] = []  # (end, transfer), a heap
        begun, ended, left = [math.nan] * count, [math.inf] * count, count
        while left and now < limit:
            for index in sorted(ready):
                begun[index] = now
                if self.watcher is not None:
                    self.watcher.check_start(index, self.transfers[index])
                demand = self.demands[index]
                if demand.num_bytes > 0:
                    fluid.start(index)
                else:
                    heapq.heappush(tails, (now + demand.tail, index))
            horizon = min(tails[0][0] if tails else math.inf, now + fluid.horizon())
            if horizon == math.inf:
                stuck = [index for index in range(count) if math.isnan(begun[index])]
                raise PlanError(
                    f"transfers {stuck} never start: they wait for each other or for transfers "
                    "behind them in the order of a shared host or device"
                )
            elapsed, now = horizon - now, horizon
            tolerance = 1e-12 * max(now, 1e-9)
            ready, finished = [], []
            for index in fluid.advance(elapsed, tolerance):
                heapq.heappush(tails, (now + self.demands[index].tail, index))
                ready += self._freed(self.followers[index])
            while tails and tails[0][0] <= now + tolerance:
                finished.append(heapq.heappop(tails)[1])
            for index in sorted(finished):
                ended[index] = now
                left -= 1
                ready += self._finish(index)
        return tuple(zip(begun, ended, strict=True))

    def _finish(self, index: int) -> list[int]:
        """Book a finished transfer; return those that may start now."""
        if self.watcher is not None:
            self.watcher.finish(self.transfers[index])
        unblocked = list(self.dependents[index])
        for lane in self.lanes[index]:
            self.heads[lane] += 1
            unblocked += self.queues[lane][self.heads[lane] : self.heads[lane] + 1]
        return self._freed(unblocked)

    def _freed(self, unblocked: Sequence[int]) -> list[int]:
        """Take a wait from each of `unblocked`; return those that may start now."""
        for other in unblocked:
            self.waits[other] -= 1
        return [other for other in dict.fromkeys(unblocked) if not self.waits[other]]
