r"""Relays in waves where operations do not block: parts arrive one after the other, not together.

A part goes from a holder to one of A hosts, its *entry*, and from there to the others. Copies that
a card sends at once share it, so equal ones would arrive together, after all of them. Time runs out
for the last parts, which take fewer latencies L for more bytes on the cards (B devices a host):

    chain     holder -> a device of every host in turn -> its other devices         A L + L inside
    inside    holder -> entry -> a device of every other host -> its other devices  2 L + L inside
    straight  holder -> entry -> every device of the other hosts                    2 L
    direct    holder -> a device of every host -> its other devices                 L + L inside
    each      holder -> every device                                                L


Chains need no waiting for a copy to end, so they take all but the last parts of a source that takes
several latencies. How large the groups are: `waves`.

Where a source takes several latencies, a card has two latencies of bytes under way: a copy waits
for an earlier one.                                                       -> paced_waves()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from attrs import define, evolve, field, frozen

from alpa_interchange.reshard import Transfer
from resharding.division import Delivery
from resharding.drafts import copy_of
from resharding.fans import Hosts, host_groups
from resharding.network import Links
from resharding.slices import Box, Cutter, split_box
from resharding.waves import MOST_TRANSFERS, Shape, Ways, num_transfers, shape_of, waves_of

# Latencies of bytes that a card has under way: with 1.5 or 3 the worst of 1,000 random pairs at
# 10 us is 1.24 or 1.25 x the bound in place of 1.21, as with 12 groups in place of 16.
_UNDER_WAY = 2.0
_MOST_PACED = 16
_LEAST_PACED = 1.5  # latencies of a source below which nearly all of it is under way at once


def waves(
    deliveries: Sequence[Delivery], links: Links, most: int = MOST_TRANSFERS
) -> list[Transfer]:
    """Return copies that all start at once, in groups of `waves_of`."""
    shape = shape_of(deliveries, links)
    made = waves_of(shape, most) if shape is not None else None
    groups = made.groups if made is not None else (("direct", 1.0, 1),)
    return _relayed(deliveries, links, groups, math.inf, shape is not None and shape.batched)


def paces(shape: Shape, most: int) -> bool:
    """Return whether `paced_waves` differ, within the transfers of a draft."""
    return shape.seconds >= _LEAST_PACED * shape.latency and _num_paced(shape, most) >= 4


def _num_paced(shape: Shape, most: int) -> int:
    """Return how many groups of `paced_waves` are relayed."""
    several = shape.per_host > 1
    relayed = ("inside" if several else "straight", 1)
    last: Ways = (("direct", 1), ("each", 1)) if several else (("each", 1),)
    few = num_transfers(shape, (relayed, relayed, *last))
    each = num_transfers(shape, (relayed, relayed, relayed, *last)) - few
    return min(_MOST_PACED, 2 + (most - few) // each)


def paced_waves(
    deliveries: Sequence[Delivery], links: Links, most: int = MOST_TRANSFERS
) -> list[Transfer]:
    """Return relays of which a card has few under way, and copies that nobody passes on."""
    shape = shape_of(deliveries, links)
    if shape is None:
        return waves(deliveries, links)
    count, devices = max(2, _num_paced(shape, most)), shape.num_hosts * shape.per_host
    inner = shape.per_host > 1
    # a latency of the card for copies to a device of every host, and one for copies to every device
    direct = min(0.3, shape.latency / shape.num_hosts / shape.seconds) if inner else 0.0
    last = min(0.3, shape.latency / devices / shape.seconds)
    relayed = 1 - direct - last
    at_once = math.ceil(_UNDER_WAY * shape.latency * count / relayed / shape.seconds) + 1
    at_once = min(count, max(2, at_once))
    # those that start at once end one wave after the other: F_g - F_(g-1) is the same
    sizes = np.ones(count)
    sizes[:at_once] = np.cumsum(1 / np.arange(at_once, 0, -1))
    sizes *= relayed / sizes.sum()
    groups = [("inside" if inner else "straight", float(size), shape.parts) for size in sizes]
    groups += [("direct", direct, 1)] if inner else []
    groups += [("each", last, 1)]
    return _relayed(deliveries, links, groups, _UNDER_WAY * shape.latency, shape.batched)


@frozen
class _Held:
    """Parts that follow each other, and the copies that brought them to the first device of each
    host."""

    parts: Sequence[Delivery]
    arrived: Sequence[Sequence[int]]
    hosts: Hosts


@define
class _Relays:
    """The transfers so far, and what each host and device has to send."""

    links: Links
    under_way: float  # seconds of bytes that a card has under way at most
    transfers: list[Transfer] = field(factory=list)
    queues: dict[int, list[tuple[int, float]]] = field(factory=dict)  # by host: copy, seconds
    sent_by: dict[int, float] = field(factory=dict)  # bytes by device
    taken: dict[int, float] = field(factory=dict)  # bytes by entry host

    def feed(
        self, parts: Sequence[Delivery], hosts: Hosts, way: str, held: _Held | None
    ) -> _Held | None:
        """Add what brings parts of a slice, one behind the other, to all devices of `hosts`, or to
        the first of each host, behind those that they `held`; return what those hold for others."""
        if way == "each":
            for part, devices in itertools.product(parts, hosts):
                for device in devices:
                    self.sent(part, device)
            return None
        arrived: list[list[int]] = [[] for _ in hosts]
        for part in parts:
            if way == "direct":
                for came, devices in zip(arrived, hosts, strict=True):
                    came.append(self.sent(part, devices[0]))
                continue
            k = self.entry(part, hosts)
            if way == "chain":
                brought = self.chain(part, [*hosts[k:], *hosts[:k]])
                for came in arrived:
                    came.append(brought)
                continue
            entry, brought = hosts[k][0], self.sent(part, hosts[k][0])
            for number, devices in enumerate(hosts):
                reached = devices if way == "straight" else devices[:1]
                passed = [self.add(part, entry, one, (brought,)) for one in reached if one != entry]
                arrived[number].append(brought if number == k else passed[0])
        if way == "straight":
            return None
        if held is None:
            return _Held(parts, arrived, hosts)
        joined = [[*old, *new] for old, new in zip(held.arrived, arrived, strict=True)]
        return _Held([*held.parts, *parts], joined, hosts)

    def entry(self, part: Delivery, hosts: Hosts) -> int:
        """Return which host takes a part in that it passes on: the one that has taken the least."""
        names = [self.links.host_of[devices[0]] for devices in hosts]
        k = min(range(len(hosts)), key=lambda each: self.taken.get(names[each], 0.0))
        self.taken[names[k]] = self.taken.get(names[k], 0.0) + part.piece.num_bytes
        return k

    def chain(self, part: Delivery, hosts: Hosts) -> int:
        """Add a chain from a holder through a device of each host; return its number."""
        entries = tuple(devices[0] for devices in hosts)
        self.sent(part, entries[0])
        if len(entries) > 1:
            made = self.transfers[-1]
            hops = itertools.pairwise((made.sender, *entries))
            rates = [self.links.hop_rate(a, b) for a, b in hops]
            chunks = self.links.network.num_chunks(part.piece.num_bytes, rates)
            self.transfers[-1] = evolve(
                made, method="broadcast", receivers=entries, num_chunks=chunks
            )
        return len(self.transfers) - 1

    def inside(self, held: _Held | None) -> None:
        """Add what the first device of each host passes on to the others."""
        if held is None:
            return
        first, last = held.parts[0].piece.box, held.parts[-1].piece.box
        whole = held.parts[0].part(Box(first.start, last.stop))
        for came, devices in zip(held.arrived, held.hosts, strict=True):
            for device in devices[1:]:
                self.add(whole, devices[0], device, tuple(came))

    def sent(self, part: Delivery, receiver: int) -> int:
        """Add a copy from the holder that has sent the least."""
        sender = min(part.senders, key=lambda device: self.sent_by.get(device, 0.0))
        host, size = self.links.host_of[sender], part.piece.num_bytes
        self.sent_by[sender] = self.sent_by.get(sender, 0.0) + size
        queue = self.queues.setdefault(host, [])
        room = self.under_way
        after: tuple[int, ...] = ()
        for index, seconds in reversed(queue) if room < math.inf else ():
            if room <= 0:
                after = (index,)
                break
            room -= seconds
        queue.append((len(self.transfers), size / self.links.host_rate[host]))
        return self.add(part, sender, receiver, after)

    def add(self, part: Delivery, sender: int, receiver: int, after: tuple[int, ...]) -> int:
        """Add a copy; return its number."""
        self.transfers.append(copy_of(part.piece.box, sender, receiver, after))
        return len(self.transfers) - 1


def _relayed(
    deliveries: Sequence[Delivery],
    links: Links,
    groups: Sequence[tuple[str, float, int]],
    under_way: float,
    batched: bool,
) -> list[Transfer]:
    """Return what feeds all deliveries: group by group (way, share of every slice, parts)."""
    relays = _Relays(links, under_way)
    lines: list[tuple[Delivery, Cutter, Hosts]] = []
    for each in deliveries:
        if not each.remote:
            for receiver in each.receivers:
                sender = min(each.senders, key=lambda device: relays.sent_by.get(device, 0.0))
                relays.sent_by[sender] = relays.sent_by.get(sender, 0.0) + each.piece.num_bytes
                relays.add(each, sender, receiver, ())
            continue
        hosts = host_groups(each.receivers, links)
        holding = host_groups(each.senders, links)
        boxes = split_box(each.piece.box, len(holding))  # a part for the card of every holder
        for box, senders in zip(boxes, holding, strict=False):
            lines.append((evolve(each.part(box), senders=senders), Cutter(box), hosts))
    inner = [k for k, (way, *_) in enumerate(groups) if way == "inside"]
    passed_on = {k for k, (way, *_) in enumerate(groups) if way == "direct"}
    passed_on.update(inner[-2:] if batched else inner)
    held: dict[int, _Held] = {}  # by line
    for k, (way, share, count) in enumerate(groups):
        for number, (delivery, cutter, hosts) in enumerate(lines):
            strip = cutter.next(share)
            heads = 1 if batched or way != "chain" else min(len(hosts[0]), count)
            for head, box in enumerate(split_box(strip, heads) if strip is not None else ()):
                # slices, and parts that are passed on at once, enter hosts by different devices
                turn = number + (head if batched else head + k)
                turned = [(*one[turn % len(one) :], *one[: turn % len(one)]) for one in hosts]
                parts = [delivery.part(each) for each in split_box(box, count // heads)]
                arrived = relays.feed(parts, turned, way, held.get(number))
                if arrived is not None:
                    held[number] = arrived
                if way == "chain":
                    relays.inside(held.pop(number, None))
            if k in passed_on:
                relays.inside(held.pop(number, None))
    return relays.transfers
