r"""Relays in waves where operations do not block: parts arrive one after the other, not together.

A part goes from a holder to one of A hosts, its *entry*, and from there to the others. Copies that
a card sends at once share it, so equal ones would arrive together, after all of them. Time runs out
for the last parts, which take fewer latencies L for more bytes on the cards (B devices a host):

    inside    holder -> entry -> a device of every other host -> its other devices  2 L + L inside
    straight  holder -> entry -> every device of the other hosts                    2 L
    direct    holder -> a device of every host -> its other devices                 L + L inside
    each      holder -> every device                                                L

Variables: s_g, seconds that one copy of group g takes on the card of its holder, and the end T.
Group g has n_g copies and brings p_g s_g of the source, and its entries pass on r_g s_g each. All
start at once, smaller ones end first; what arrives is passed on one group after the other:

    F_g = sum over h <= g of n_h s_h + s_g sum over h > g of n_h          fair sharing
    F_g + sum over h >= g of r_h s_h + latencies of g = T                 groups are done together
    sum p_g s_g = seconds of the source on its cards, sent once           -> _sizes()

Where a source takes several latencies, a card has two latencies of bytes under way: a copy waits
for an earlier one.                                                       -> paced_waves()
"""

from __future__ import annotations

import functools
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

# Transfers of one draft: with 224 the mean ratio of 1,000 random pairs at 10 us is 0.05 % more, and
# the worst is 1.53 in place of 1.31.
_MOST_TRANSFERS = 256
# Relayed groups that are compared: with 1 and 2 alone that mean is 0.1 % more, with 12 as well
# 0.03 % less.
_GROUPS = (1, 2, 4, 8)
# Latencies of bytes that a card has under way: with 1.5 or 3, 18 of those pairs are above 1.15 x
# the bound in place of 16.
_UNDER_WAY = 2.0
_LEAST_PACED = 1.5  # latencies of a source below which nearly all of it is under way at once


@frozen
class Shape:
    """What the sizes of groups depend on."""

    seconds: float  # of the source on the cards of its holders, each byte sent once
    latency: float
    num_sources: int  # hosts of holders
    num_hosts: int  # to which a slice goes
    per_host: int  # devices there
    num_slices: int  # by host of holders
    num_copies: int  # of slices to hosts, once

    @property
    def parts(self) -> int:
        """Of a slice in a group that is relayed: all entries take part."""
        return max(1, round(self.num_hosts / self.num_slices))

    def least(self, fan: str) -> float:
        """Return seconds that one of `resharding.fans` takes at least."""
        inner = self.latency if self.per_host > 1 else 0.0
        return {
            "star": self.seconds * self.num_hosts + self.latency,
            "parallel_chains": self.seconds + self.num_hosts * self.latency + inner,
        }[fan]


@frozen
class Waves:
    """The end that is expected, and (way, share of a slice, parts) of groups, in order."""

    seconds: float
    groups: tuple[tuple[str, float, int], ...]


def shape_of(deliveries: Sequence[Delivery], links: Links) -> Shape | None:
    """Return the shape of what goes to other hosts; None where nothing goes to several devices.

    Where at least as many hosts hold as take in, the card of the busiest one that takes in is what
    all wait for: it stands for the card of a single holder that feeds a single host.
    """
    host_of = links.host_of
    remote = [each for each in deliveries if each.remote]
    most = max((len(each.receivers) for each in remote), default=1)
    if most < 2:
        return None
    into: dict[int, float] = {}  # host -> seconds
    number: dict[int, int] = {}  # host -> copies
    sources: set[int] = set()
    fed = parts = 0
    for each in remote:
        holding = {host_of[device] for device in each.senders}
        taking = {host_of[device] for device in each.receivers}
        sources |= holding
        parts += len(holding)
        fed = max(fed, len(taking))
        for host in taking:
            into[host] = into.get(host, 0.0) + each.piece.num_bytes / links.host_rate[host]
            number[host] = number.get(host, 0) + len(holding)
    seconds = sum(each.piece.num_bytes for each in remote)
    seconds /= sum(links.host_rate[host] for host in sources)
    shape = Shape(
        seconds=seconds,
        latency=links.network.latency,
        num_sources=len(sources),
        num_hosts=fed,
        per_host=-(-most // fed),
        num_slices=max(1, parts // len(sources)),
        num_copies=parts * fed,
    )
    if len(sources) < fed or fed == 1 and max(into.values()) <= seconds:
        return shape
    busiest = max(into, key=into.__getitem__)
    return evolve(
        shape, seconds=into[busiest], num_sources=1, num_hosts=1, num_slices=number[busiest]
    )


@functools.lru_cache(maxsize=1024)
def waves_of(shape: Shape) -> Waves | None:
    """Return the groups that are done first; None if none are within the transfers of a draft."""
    best: Waves | None = None
    several, relays = shape.per_host > 1, shape.num_hosts > 1
    tails = [(), ("each",)] + ([("direct",), ("direct", "each")] if several and relays else [])
    for count in _GROUPS:
        relayed = [("straight" if relays else "direct",) * count]
        if several and relays:
            relayed += [("inside",) * count, ("inside",) * (count - 1) + ("straight",)]
        for ways in dict.fromkeys((*each, *tail) for each in relayed for tail in tails):
            sizes = _sizes(shape, ways) if _transfers(shape, ways) <= _MOST_TRANSFERS else None
            # a group more must gain something for its transfers
            if sizes is not None and (best is None or sizes[0] < best.seconds * 0.998):
                best = Waves(
                    sizes[0],
                    tuple(_group(shape, *each) for each in zip(ways, sizes[1:], strict=True)),
                )
    return best


def _transfers(shape: Shape, ways: Sequence[str]) -> int:
    each = {
        "inside": shape.parts + shape.per_host - 1,
        "straight": shape.parts * shape.per_host,
        "direct": shape.per_host,
        "each": shape.per_host,
    }
    return sum(each[way] for way in ways) * shape.num_copies


def _group(shape: Shape, way: str, size: float) -> tuple[str, float, int]:
    parts = shape.parts if way in ("inside", "straight") else 1
    return way, size * parts * shape.num_slices / shape.seconds, parts


def _sizes(shape: Shape, ways: Sequence[str]) -> list[float] | None:
    """Return T and s_g of groups that go these ways; None if they cannot be done together."""
    latency, hosts = shape.latency, shape.num_hosts
    inner = latency if shape.per_host > 1 else 0.0
    copies, brought, passed, late = [], [], [], []
    for way in ways:
        if way in ("inside", "straight"):
            number = shape.num_slices * shape.parts
            copies.append(number)
            brought.append(number)
            again = shape.per_host if way == "straight" else 1
            passed.append(number * shape.num_sources * (hosts - 1) / hosts * again)
            late.append(2 * latency + (inner if way == "inside" else 0.0))
        else:
            copies.append(shape.num_slices * hosts * (shape.per_host if way == "each" else 1))
            brought.append(shape.num_slices)
            passed.append(0.0)
            late.append(latency + (inner if way == "direct" else 0.0))
    count = len(ways)
    matrix, right = np.zeros((count + 1, count + 1)), np.zeros(count + 1)
    for g in range(count):
        matrix[g, :g] = copies[:g]
        matrix[g, g] = sum(copies[g:])
        if passed[g]:
            matrix[g, g:count] += passed[g:]
    matrix[:count, count] = -1.0
    matrix[count, :count] = brought
    right[:count] = np.negative(late)
    right[count] = shape.seconds
    found = np.linalg.solve(matrix, right)
    sizes = found[:count]
    if sizes[0] <= 0 or (np.diff(sizes) < -1e-9 * sizes[-1]).any():
        return None
    return [float(found[count]), *sizes.tolist()]


def waves(deliveries: Sequence[Delivery], links: Links) -> list[Transfer]:
    """Return copies that all start at once, in groups of `waves_of`."""
    shape = shape_of(deliveries, links)
    made = waves_of(shape) if shape is not None else None
    groups = made.groups if made is not None else (("direct", 1.0, 1),)
    return _relayed(deliveries, links, groups, math.inf)


def paces(shape: Shape) -> bool:
    """Return whether `paced_waves` differ, within the transfers of a draft."""
    ways = ("inside",) * _num_paced(shape)
    return shape.seconds >= _LEAST_PACED * shape.latency and len(ways) >= 4


def _num_paced(shape: Shape) -> int:
    each = _transfers(shape, ("inside",))
    return min(12, _MOST_TRANSFERS // each)


def paced_waves(deliveries: Sequence[Delivery], links: Links) -> list[Transfer]:
    """Return relays of which a card has few under way, and copies that nobody passes on."""
    shape = shape_of(deliveries, links)
    if shape is None:
        return waves(deliveries, links)
    count, devices = max(1, _num_paced(shape)), shape.num_hosts * shape.per_host
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
    return _relayed(deliveries, links, [*groups, ("each", last, 1)], _UNDER_WAY * shape.latency)


@define
class _Relays:
    """The transfers so far, and what each host and device has to send."""

    links: Links
    under_way: float  # seconds of bytes that a card has under way at most
    transfers: list[Transfer] = field(factory=list)
    queues: dict[int, list[tuple[int, float]]] = field(factory=dict)  # by host: copy, seconds
    sent_by: dict[int, float] = field(factory=dict)  # bytes by device
    taken: dict[int, float] = field(factory=dict)  # bytes by entry host

    def feed(self, parts: Sequence[Delivery], hosts: Hosts, way: str) -> None:
        """Add what brings parts of a slice, one behind the other, to all devices of `hosts`."""
        if way == "each":
            for part, devices in itertools.product(parts, hosts):
                for device in devices:
                    self.sent(part, device)
            return
        arrived: list[list[int]] = [[] for _ in hosts]
        for part in parts:
            if way == "direct":
                for came, devices in zip(arrived, hosts, strict=True):
                    came.append(self.sent(part, devices[0]))
                continue
            names = [self.links.host_of[devices[0]] for devices in hosts]
            k = min(range(len(hosts)), key=lambda each: self.taken.get(names[each], 0.0))
            self.taken[names[k]] = self.taken.get(names[k], 0.0) + part.piece.num_bytes
            entry, brought = hosts[k][0], self.sent(part, hosts[k][0])
            for number, devices in enumerate(hosts):
                reached = devices if way == "straight" else devices[:1]
                passed = [self.add(part, entry, one, (brought,)) for one in reached if one != entry]
                arrived[number].append(brought if number == k else passed[0])
        if way != "straight":
            first, last = parts[0].piece.box, parts[-1].piece.box
            whole = parts[0].part(Box(first.start, last.stop))
            for came, devices in zip(arrived, hosts, strict=True):
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
    for way, share, count in groups:
        for number, (delivery, cutter, hosts) in enumerate(lines):
            cuts = [cutter.next(share / count) for _ in range(count)]
            parts = [delivery.part(cut) for cut in cuts if cut is not None]
            if parts:  # slices enter hosts by different devices
                turned = [(*one[number % len(one) :], *one[: number % len(one)]) for one in hosts]
                relays.feed(parts, turned, way)
    return relays.transfers
