r"""What latency adds to the time no plan beats: bytes that leave late cannot be passed on.

Plans end at T, every operation takes one latency L at least, and only what needs a slice passes it
on. Count back from T in windows of L: what a set of ports with r bytes/s in all sends in the last
L + L reaches only whom it is sent to; what it sends one window earlier can be passed on once more.
With c_k(n) = how many of n receivers one copy sent in window k can end at,

    operations that block   a holder feeds one other per L, so holders double:  c_k(n) = min(n, 2^k)
    otherwise               one who holds it feeds all others at once:  c_0 = 1, c_k(n) = n

D_i bytes for n_i receivers take n_i / c_k(n_i) sends in window k, of which each has room for r L
bytes; those with the fewest receivers lose least by going last.                -> late_seconds()
It holds for the cards of a host that lacks slices (n_i: its devices that need slice i), and for the
cards and the ports of those who hold a slice (n_i: devices that need it in hosts that lack it, or
anywhere).

All that hosts (devices) take in is sent by those who hold slices at first, from 0 to T - L, or by
receivers, from L to T - L; into a host it takes as many sends as above.        -> spread_seconds()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from resharding.network import Links
from resharding.slices import Slice

Items = Sequence[tuple[int, float]]  # receivers, bytes


def latency_bound(moving: Iterable[Slice], links: Links) -> float:
    """Return seconds that plans for slices with receivers take at least; 0 without latency."""
    latency, host_of = links.network.latency, links.host_of
    if not latency:
        return 0.0
    doubles = links.network.issue != "none"
    entering: dict[int, dict[int, float]] = {}  # host -> receivers there -> bytes
    by_holders: dict[frozenset[int], dict[int, float]] = {}
    by_hosts: dict[frozenset[int], dict[int, float]] = {}
    into: dict[frozenset[int], dict[int, float]] = {}  # by receivers in one host
    takers: dict[frozenset[int], set[int]] = {}  # hosts that they go to
    for piece in moving:
        holders = frozenset(piece.holders)
        holder_hosts = frozenset(host_of[device] for device in holders)
        add(by_holders.setdefault(holders, {}), len(piece.receivers), piece.num_bytes)
        inside: dict[int, int] = {}
        for device in piece.receivers:
            host = host_of[device]
            if host not in holder_hosts:
                inside[host] = inside.get(host, 0) + 1
        for host, count in inside.items():
            add(entering.setdefault(host, {}), count, piece.num_bytes)
        if inside:
            add(by_hosts.setdefault(holder_hosts, {}), sum(inside.values()), piece.num_bytes)
            takers.setdefault(holder_hosts, set()).update(inside)
            for count in inside.values():
                add(into.setdefault(holder_hosts, {}), count, piece.num_bytes)
    bound = max(
        (
            late_seconds(sorted(items.items()), links.host_rate[host], latency, doubles)
            for host, items in entering.items()
        ),
        default=0.0,
    )
    for sent, rate in ((by_holders, links.device_rate), (by_hosts, links.host_rate)):
        for holders, items in with_union(sent):
            holding = sum(rate[each] for each in holders)
            bound = max(bound, late_seconds(sorted(items.items()), holding, latency, doubles))
    for holders, items in with_union(into):
        holding = sum(links.host_rate[host] for host in holders)
        taking = {host for each, hosts in takers.items() if each <= holders for host in hosts}
        others = sum(links.host_rate[host] for host in taking - holders)
        pairs = sorted(items.items())
        intake = sum(links.host_rate[host] for host in taking)
        bound = max(bound, spread_seconds(pairs, (holding, others, intake), latency, doubles))
    return bound


def late_seconds(items: Items, rate: float, latency: float, doubles: bool) -> float:
    """Return the least time in which ports of `rate` bytes/s in all send `items`, fewest receivers
    first, so that all receivers have them; with `doubles`, holders at most double in a latency."""
    left, seconds, window = list(items), latency, 0
    while left:
        reach = _reach(window, doubles)
        if left[-1][0] <= reach:
            return seconds + sum(amount for _, amount in left) / rate
        room = rate * latency
        room = _sent(left, room, reach)
        seconds += latency - room / rate
        window += 1
    return seconds


def _sent(left: list[tuple[int, float]], room: float, reach: float) -> float:
    """Take from `left`, fewest receivers first, what sends of `room` bytes carry, each of which
    reaches `reach` receivers; return the bytes of sends that are left over."""
    while left and room > 0:
        count, amount = left[0]
        sends = max(1.0, count / reach)
        if amount * sends > room:
            left[0] = count, amount - room / sends
            return 0.0
        left.pop(0)
        room -= amount * sends
    return room


def spread_seconds(
    items: Items, rates: tuple[float, float, float], latency: float, doubles: bool
) -> float:
    """Return a time below the least in which `items` are sent by ports of `rates[0]` bytes/s in all
    from the beginning and of `rates[1]` from one latency on, into ports of `rates[2]` in all, by at
    most 0.1 %."""
    holding, receiving, intake = rates
    low = latency + sum(amount for _, amount in items) / min(holding + receiving, intake)
    high = late_seconds(items, holding, latency, doubles) + latency
    while high > low * 1.001:
        middle = (low + high) / 2
        if _spread_in(items, middle - latency, rates, latency, doubles):
            high = middle
        else:
            low = middle
    return low


def _spread_in(
    items: Items,
    seconds: float,
    rates: tuple[float, float, float],
    latency: float,
    doubles: bool,
) -> bool:
    """Return whether sends of `seconds`, before the last latency, can carry `items`."""
    holding, receiving, intake = rates
    left, window, end = list(items), 0, seconds
    while left and end > 0:
        reach = _reach(window, doubles)
        begin = 0.0 if left[-1][0] <= reach else max(0.0, end - latency)
        alone = max(0.0, min(end, latency) - begin)  # when only holders can send
        both = end - begin - alone
        room = alone * min(holding, intake) + both * min(holding + receiving, intake)
        _sent(left, room, reach)
        end, window = begin, window + 1
    return not left


def _reach(window: int, doubles: bool) -> float:
    """Return how many receivers one copy ends at that is sent in a window, counted from the end."""
    return 2.0**window if doubles else math.inf if window else 1.0


def with_union(
    sent: Mapping[frozenset[int], Mapping[int, float]],
) -> Iterator[tuple[frozenset[int], Mapping[int, float]]]:
    """Yield the items of every set of holders, and of all together."""
    yield from sent.items()
    if len(sent) > 1:
        every: dict[int, float] = {}
        for items in sent.values():
            for count, amount in items.items():
                add(every, count, amount)
        yield frozenset().union(*sent), every


def add(items: dict[int, float], count: int, amount: float) -> None:
    items[count] = items.get(count, 0.0) + amount
