"""The referee: what a plan takes in a fluid model of the network, and whether it is valid.

Model (event-driven): a full-duplex card per host and a full-duplex port per device, a switch
without blocking, rates by max-min fair sharing.

* copy: one flow of D bytes.
* broadcast: a chain; all hops run at one rate. After the D bytes it takes the fill time
  sum_h c/b_h - max_h c/b_h (c = D/K bytes per chunk, b_h the uncontended rate of hop h).
* gather: a ring over n devices; every edge carries D (n-1)/n.
* local: nothing.
* latency: (K + H - 1) per chain of H hops and K chunks, n - 1 per ring, 1 per copy.

An operation starts when all of `after` are done and, by the issue model of the network, every
earlier operation of its hosts ("host") or devices ("device") is done. The bytes an operation sends
must be on its sender when it starts, and every target tile must be complete at the end:
`PlanError` otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, frozen

from alpa_interchange.reshard import ReshardingTask, Transfer
from alpa_interchange.tensor import dtype_bytes
from resharding.coverage import Ledger, PlanError
from resharding.network import Network
from resharding.slices import hosts_of
from resharding.traffic import edge_bytes, edges

Port = tuple[str, int]  # ("nic out" | "nic in" | "port out" | "port in", host or device)


@frozen(kw_only=True)
class Simulation:
    """What a plan took: `seconds` in all, (start, stop) per transfer, bytes through each card."""

    seconds: float
    intervals: tuple[tuple[float, float], ...]
    bytes_out: Mapping[int, float]  # per host, over its card
    bytes_in: Mapping[int, float]


@define
class _Flow:
    """A running operation: bytes left, the uses of each port, and the time after the bytes."""

    index: int
    left: float
    ports: dict[Port, int]
    tail: float
    rate: float = 0.0


def simulate(task: ReshardingTask, transfers: tuple[Transfer, ...], network: Network) -> Simulation:
    """Return the course of `transfers`; PlanError if they do not do `task`."""
    return _Referee(task, transfers, network).run()


class _Referee:
    def __init__(
        self, task: ReshardingTask, transfers: tuple[Transfer, ...], network: Network
    ) -> None:
        self.transfers, self.network = transfers, network
        self.host_of = hosts_of(task)
        self.element = dtype_bytes(task.tensor.dtype)
        self.ledger = Ledger(task, transfers)
        self.queues: dict[int, list[int]] = {}
        self.lanes = [self._lanes(transfer) for transfer in transfers]
        for index, lanes in enumerate(self.lanes):
            for lane in lanes:
                self.queues.setdefault(lane, []).append(index)
        self.heads = dict.fromkeys(self.queues, 0)
        self.dependents: list[list[int]] = [[] for _ in transfers]
        for index, transfer in enumerate(transfers):
            for earlier in transfer.after:
                if not 0 <= earlier < len(transfers):
                    raise PlanError(f"transfer {index} waits for transfer {earlier}, which is none")
                self.dependents[earlier].append(index)
        self.done = [False] * len(transfers)
        self.bytes_out: dict[int, float] = {}
        self.bytes_in: dict[int, float] = {}

    def run(self) -> Simulation:
        """Advance from event to event until every transfer is done."""
        now = 0.0
        waiting = set(range(len(self.transfers)))
        candidates = sorted(waiting)
        flows: list[_Flow] = []
        tails: list[tuple[float, int]] = []  # (end, transfer)
        begun = [math.nan] * len(self.transfers)
        ended = [math.nan] * len(self.transfers)
        while waiting or flows or tails:
            changed = False
            for index in candidates:
                if index in waiting and self._may_start(index):
                    waiting.remove(index)
                    changed, begun[index] = True, now
                    self.ledger.check_start(index, self.transfers[index])
                    flow = self._flow(index)
                    if flow.left > 0:
                        flows.append(flow)
                    else:
                        tails.append((now + flow.tail, index))
            if changed:
                self._share(flows)
            if not flows and not tails:
                raise PlanError(
                    f"transfers {sorted(waiting)} never start: they wait for each other or for "
                    "transfers behind them in the order of a shared host or device"
                )
            horizon = min(
                min((now + flow.left / flow.rate for flow in flows), default=math.inf),
                min((end for end, _ in tails), default=math.inf),
            )
            elapsed, now = horizon - now, horizon
            ready = 1e-12 * max(now, 1e-9)
            emptied = []
            for flow in flows:
                flow.left -= flow.rate * elapsed
                if flow.left <= flow.rate * ready:
                    emptied.append(flow)
            for flow in emptied:
                flows.remove(flow)
                tails.append((now + flow.tail, flow.index))
            if emptied:
                self._share(flows)
            finished = sorted(index for end, index in tails if end <= now + ready)
            tails = [(end, index) for end, index in tails if end > now + ready]
            candidates = []
            for index in finished:
                ended[index] = now
                candidates += self._finish(index)
            candidates.sort()
        self.ledger.check_end()
        return Simulation(
            seconds=now,
            intervals=tuple(zip(begun, ended, strict=True)),
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
        )

    def _lanes(self, transfer: Transfer) -> tuple[int, ...]:
        """Return the hosts or devices whose order the transfer stands in."""
        if self.network.issue == "none" or transfer.method == "local":
            return ()
        devices = dict.fromkeys((transfer.sender, *transfer.receivers))
        if self.network.issue == "device":
            return tuple(devices)
        return tuple(dict.fromkeys(self.host_of[device] for device in devices))

    def _may_start(self, index: int) -> bool:
        if not all(self.done[earlier] for earlier in self.transfers[index].after):
            return False
        return all(self.queues[lane][self.heads[lane]] == index for lane in self.lanes[index])

    def _finish(self, index: int) -> list[int]:
        """Book a finished transfer; return those that may be able to start now."""
        self.done[index] = True
        self.ledger.finish(self.transfers[index])
        unblocked = list(self.dependents[index])
        for lane in self.lanes[index]:
            self.heads[lane] += 1
            unblocked += self.queues[lane][self.heads[lane] : self.heads[lane] + 1]
        return unblocked

    def _flow(self, index: int) -> _Flow:
        transfer = self.transfers[index]
        latency, pairs = self.network.latency, edges(transfer)
        if not pairs:
            return _Flow(index, 0.0, {}, 0.0)
        amount = edge_bytes(transfer, self.element)
        if transfer.method == "gather":
            tail = latency * (len(pairs) - 1)
        else:
            fills = [amount / transfer.num_chunks / self._hop(a, b) for a, b in pairs]
            tail = sum(fills) - max(fills) + latency * (transfer.num_chunks + len(pairs) - 1)
        ports: dict[Port, int] = {}
        for a, b in pairs:
            used: list[Port] = [("port out", a), ("port in", b)]
            if self.host_of[a] != self.host_of[b]:
                source, target = self.host_of[a], self.host_of[b]
                used += [("nic out", source), ("nic in", target)]
                self.bytes_out[source] = self.bytes_out.get(source, 0.0) + amount
                self.bytes_in[target] = self.bytes_in.get(target, 0.0) + amount
            for port in used:
                ports[port] = ports.get(port, 0) + 1
        return _Flow(index, amount, ports, tail)

    def _hop(self, sender: int, receiver: int) -> float:
        return self.network.hop_bandwidth(self.host_of[sender] != self.host_of[receiver])

    def _share(self, flows: list[_Flow]) -> None:
        """Set max-min fair rates: fill all flows evenly, freeze those at a port that runs full."""
        room: dict[Port, float] = {}
        users: dict[Port, int] = {}
        for flow in flows:
            for port, times in flow.ports.items():
                card = port[0].startswith("nic")
                room[port] = self.network.nic_bandwidth if card else self.network.device_bandwidth
                users[port] = users.get(port, 0) + times
        active, level = list(flows), 0.0
        while active:
            tightest = min(
                (port for port in users if users[port]), key=lambda p: room[p] / users[p]
            )
            level = max(level, room[tightest] / users[tightest])  # rounding may not lower it
            frozen_now = [flow for flow in active if tightest in flow.ports]
            for flow in frozen_now:
                flow.rate = level
                for port, times in flow.ports.items():
                    room[port] -= level * times
                    users[port] -= times
            active = [flow for flow in active if tightest not in flow.ports]
