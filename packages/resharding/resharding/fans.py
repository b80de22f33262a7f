"""Broadcasts for small tensors where operations do not block: many parts at once, few latencies.

A slice goes to one device of each of A hosts, and from there to the others of that host by a copy
each. D bytes, t = D / card rate, L latency, P parts that run side by side:

    star              a copy from the holder to every host                  A t + L
    parallel_chains   a chain through the hosts for every part              t (1 + (A-1)/P) + A L

and one latency inside the hosts. Chunks of one chain come one latency apart, parts do not: with
latency and nothing that blocks, many chains of few chunks end before one of many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from attrs import define, field

from alpa_interchange.reshard import Transfer
from resharding.division import Delivery
from resharding.drafts import copy_of
from resharding.network import Links
from resharding.slices import bounding_hosts, by_host, split_box

# Transfers of one draft: with 256 the mean ratio of 1,000 random pairs at 10 us is 0.06 % less, and
# 95 % are planned in a fifth more time.
_MOST_TRANSFERS = 160
_MOST_PARTS = 32
# Of the latency that parts of a slice may wait for each other: a quarter is below what a plan of
# two or three latencies is searched on for.
_FILL = 0.25

Hosts = Sequence[tuple[int, ...]]  # devices by host; of receivers, the one fed first in front


def star(deliveries: Sequence[Delivery], links: Links) -> list[Transfer]:
    """Return copies from a holder to every host, and inside; or to every device, if all of them
    take less time on the cards than the latency inside."""
    entering: dict[int, float] = {}  # seconds on the card of a host beyond one copy of each slice
    leaving: dict[frozenset[int], float] = {}
    for each in deliveries:
        if each.remote:
            for devices in host_groups(each.receivers, links):
                host, more = links.host_of[devices[0]], (len(devices) - 1) * each.piece.num_bytes
                entering[host] = entering.get(host, 0.0) + more / links.host_rate[host]
                holders = frozenset(links.host_of[device] for device in each.senders)
                rate = sum(links.host_rate[one] for one in holders)
                leaving[holders] = leaving.get(holders, 0.0) + more / rate
    most = max((*entering.values(), *leaving.values()), default=0.0)
    feed = _Fans.star if most > links.network.latency else _Fans.each
    return _fanned(deliveries, links, feed, lambda hosts: 0)


def parallel_chains(deliveries: Sequence[Delivery], links: Links) -> list[Transfer]:
    """Return chains through the hosts, one for each part."""
    return _fanned(deliveries, links, _Fans.chain, lambda hosts: len(hosts) - 1)


@define
class _Fans:
    """The transfers so far, and what each host and device has to send."""

    links: Links
    transfers: list[Transfer] = field(factory=list)
    sent: dict[int, float] = field(factory=dict)  # seconds by host
    sent_by: dict[int, float] = field(factory=dict)  # bytes by device
    holders: dict[tuple[int, ...], Hosts] = field(factory=dict)  # by host, for each set of them

    def star(self, part: Delivery, hosts: Hosts, turn: int) -> None:
        """Feed every host from a holder."""
        for devices in hosts:
            sender = self.sender_of(part)
            self.inside(part, devices, self.copy(part, sender, devices[0]))

    def each(self, part: Delivery, hosts: Hosts, turn: int) -> None:
        """Feed every device from a holder."""
        for devices in hosts:
            for device in devices:
                self.copy(part, self.sender_of(part), device)

    def chain(self, part: Delivery, hosts: Hosts, turn: int) -> None:
        """Feed the hosts one after the other."""
        ordered = [*hosts[turn % len(hosts) :], *hosts[: turn % len(hosts)]]
        entries = tuple(devices[0] for devices in ordered)
        sender = self.sender_of(part)
        if len(entries) == 1:
            self.inside(part, ordered[0], self.copy(part, sender, entries[0]))
            return
        rates = [self.links.hop_rate(a, b) for a, b in itertools.pairwise((sender, *entries))]
        brought = len(self.transfers)
        self.transfers.append(
            Transfer(
                method="broadcast",
                start=part.piece.box.start,
                stop=part.piece.box.stop,
                sender=sender,
                receivers=entries,
                num_chunks=self.links.network.num_chunks(part.piece.num_bytes, rates),
            )
        )
        for devices in ordered:
            self.inside(part, devices, brought)

    def inside(self, part: Delivery, devices: Sequence[int], brought: int) -> None:
        """Feed the other devices of a host from the first one, which has the part."""
        for device in devices[1:]:
            self.copy(part, devices[0], device, brought)

    def copy(self, part: Delivery, sender: int, receiver: int, after: int | None = None) -> int:
        """Add a copy; return its number."""
        waits = () if after is None else (after,)
        self.transfers.append(copy_of(part.piece.box, sender, receiver, waits))
        return len(self.transfers) - 1

    def sender_of(self, part: Delivery) -> int:
        """Return the holder whose host has the least to send so far."""
        size, holding = part.piece.num_bytes, self.holders.get(part.senders)
        if holding is None:
            holding = self.holders[part.senders] = host_groups(part.senders, self.links)
        rate, host_of = self.links.host_rate, self.links.host_of
        ends = [self.sent.get(h, 0.0) + size / rate[h] for h in (host_of[d[0]] for d in holding)]
        k = min(range(len(ends)), key=ends.__getitem__)
        sender = min(holding[k], key=lambda device: self.sent_by.get(device, 0.0))
        self.sent[host_of[sender]] = ends[k]
        self.sent_by[sender] = self.sent_by.get(sender, 0.0) + size
        return sender


def _fanned(
    deliveries: Sequence[Delivery],
    links: Links,
    feed: Callable[[_Fans, Delivery, Hosts, int], None],
    fills: Callable[[Hosts], int],
) -> list[Transfer]:
    """Return what feeds all deliveries; `fills(hosts)` is how many times a part is waited for."""
    fans, turn, first = _Fans(links), 0, 0
    remote = [each for each in deliveries if each.remote]
    most = _MOST_TRANSFERS // max(1, sum(len(each.receivers) for each in remote))
    for delivery in deliveries:
        if not delivery.remote:
            sender = min(delivery.senders, key=lambda device: fans.sent_by.get(device, 0.0))
            for receiver in delivery.receivers:
                fans.copy(delivery, sender, receiver)
            continue
        hosts = host_groups(delivery.receivers, links)
        count = _num_parts(delivery, hosts, links, fills(hosts), len(remote))
        unit = 1
        if count > 1:  # as many for every holder, and every host, unless slices take turns
            unit = len(bounding_hosts(delivery.senders, links.host_of)) if len(remote) < 3 else 1
            unit = math.lcm(unit, len(hosts)) if fills(hosts) and len(remote) < 4 else unit
            count = max(1, min(count, most, _MOST_PARTS) // unit) * unit
        parts = [delivery.part(box) for box in split_box(delivery.piece.box, count)]
        for number, part in enumerate(parts):
            rotated = [
                (*devices[turn % len(devices) :], *devices[: turn % len(devices)])
                for devices in hosts
            ]
            # parts that begin at the same host follow each other: one box for its process
            feed(fans, part, rotated, first + number * len(hosts) // len(parts))
            turn += 1
        first += 1
    return fans.transfers


def host_groups(devices: Sequence[int], links: Links) -> Hosts:
    """Return `devices` host by host."""
    return [tuple(each) for each in by_host(devices, links.host_of).values()]


def _num_parts(delivery: Delivery, hosts: Hosts, links: Links, fills: int, num_slices: int) -> int:
    """Return into how many parts to cut a slice, so that little time goes by waiting for one."""
    latency, size = links.network.latency, delivery.piece.num_bytes
    entry = links.hop_rate(delivery.senders[0], delivery.receivers[0])
    most_inside = max(len(devices) for devices in hosts) - 1
    inside = min(links.device_rate[device] for device in delivery.receivers)
    waiting = most_inside * size / inside + fills * size / entry
    holders = len(bounding_hosts(delivery.senders, links.host_of))
    wanted = math.ceil(waiting / (_FILL * max(latency, 1e-9)))
    return max(wanted, holders if num_slices < 3 and size / entry > _FILL * latency else 1)
