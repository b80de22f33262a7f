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

Or equal parts follow each other, each as soon as the one before it has left, which takes no latency
(`course`), in a row for every pair of cards. All rows of a card share it evenly: each brings
an entry 1/A of what the card sends, which it passes on as fast.                 -> paced_waves()
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from alpa_interchange.reshard import Transfer
from resharding.division import Delivery
from resharding.drafts import copy_of
from resharding.fans import Hosts, host_groups
from resharding.network import Links
from resharding.slices import Box, Cutter, split_box
from resharding.waves import MOST_TRANSFERS, RELAYED, Shape, Ways, num_transfers, shape_of, waves_of

# Groups that are paced, and the most of a source that goes on a way of fewer latencies: with 12 or
# 24 groups the mean of 1,000 random pairs at 10 us is the same to 0.01 %, with 0.3 it is 1.0082 x
# the bound in place of 1.0079, with 0.7 the same to 0.01 %.
_MOST_PACED = 16
_MOST_LAST = 0.5


def waves(
    deliveries: Sequence[Delivery], links: Links, most: int = MOST_TRANSFERS
) -> list[Transfer]:
    """Return copies that all start at once, in groups of `waves_of`."""
    shape = shape_of(deliveries, links)
    made = waves_of(shape, most) if shape is not None else None
    groups = made.groups if made is not None else (("direct", 1.0, 1),)
    return _relayed(deliveries, links, groups, False, shape is not None and shape.batched)


@frozen
class Paced:
    """How many equal groups go `way`, then seconds of the source by the ways of those behind them,
    and the end that is expected."""

    seconds: float
    way: str
    count: int
    last: tuple[tuple[str, float], ...]


@functools.lru_cache(maxsize=1024)  # whoever asks whether it pays has it made then
def paced_of(shape: Shape, most: int = MOST_TRANSFERS) -> Paced | None:
    """Return the groups of `paced_waves` that are done first, of those within `most` transfers.

    With `step` seconds a group, relays end a step and their latencies behind the card that sends
    what they pass on: meanwhile it sends, with fewer latencies, what nobody or who has less to do
    passes on.
    """
    inner, hosts, latency = shape.per_host > 1, shape.num_hosts, shape.latency
    way = "inside" if inner else "straight"
    latencies = 1 + (hosts > 1) + inner
    tails: list[tuple[str, ...]] = [(), ("each",)]
    if inner:
        tails += [("direct",), ("direct", "each")]
    best: Paced | None = None
    for tail in tails:
        behind: Ways = tuple((each, 1) for each in tail)
        few = num_transfers(shape, ((way, 1), (way, 1), *behind))
        each = num_transfers(shape, ((way, 1),) * 3 + behind) - few
        if few > most:
            continue
        count = min(_MOST_PACED, 2 + (most - few) // max(1, each))
        step = shape.seconds / count
        room, sent = (latencies - 1) * latency + step, {}
        if "direct" in tail:
            sent["direct"], room = (latency + step) / hosts, latency
        if "each" in tail:
            sent["each"] = room / (hosts * shape.per_host)
        last = tuple((one, min(_MOST_LAST * shape.seconds, sent[one])) for one in tail)
        left = shape.seconds - sum(seconds for _, seconds in last)
        end = left + latencies * latency + step
        if best is None or end < best.seconds:
            best = Paced(end, way, count, last)
    return best


def paced_waves(
    deliveries: Sequence[Delivery], links: Links, most: int = MOST_TRANSFERS
) -> list[Transfer]:
    """Return relays of equal parts that follow each other on every way between two hosts, and
    copies with fewer latencies for what is sent last.

    A holder sends to all entries side by side, and they to each other, so that all cards are in use
    from one latency after the start; a part leaves when the one before it has left.
    """
    shape = shape_of(deliveries, links)
    made = paced_of(shape, most) if shape is not None else None
    if shape is None or made is None:
        return waves(deliveries, links)
    last = [(way, seconds / shape.seconds) for way, seconds in made.last]
    relayed = (1 - sum(share for _, share in last)) / made.count
    ways = [(made.way, relayed)] * made.count + last
    groups = [(way, share, shape.parts if way in RELAYED else 1) for way, share in ways]
    return _relayed(deliveries, links, groups, True, shape.batched)


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
    ordered: bool  # copies from host to host follow each other
    transfers: list[Transfer] = field(factory=list)
    lasts: dict[tuple[int, int], int] = field(factory=dict)  # by cards: the last copy
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
        self.sent_by[sender] = self.sent_by.get(sender, 0.0) + part.piece.num_bytes
        return self.add(part, sender, receiver, ())

    def add(self, part: Delivery, sender: int, receiver: int, after: tuple[int, ...]) -> int:
        """Add a copy; return its number."""
        way = self.links.cards_out[sender], self.links.cards_in[receiver]
        if self.ordered and self.links.host_of[sender] != self.links.host_of[receiver]:
            if way in self.lasts:
                after = tuple(sorted({*after, self.lasts[way]}))
            self.lasts[way] = len(self.transfers)
        self.transfers.append(copy_of(part.piece.box, sender, receiver, after))
        return len(self.transfers) - 1


def _relayed(
    deliveries: Sequence[Delivery],
    links: Links,
    groups: Sequence[tuple[str, float, int]],
    ordered: bool,
    batched: bool,
) -> list[Transfer]:
    """Return what feeds all deliveries: group by group (way, share of every slice, parts)."""
    relays = _Relays(links, ordered)
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
