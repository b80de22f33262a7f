r"""The time no plan beats where a lane, a host or a device, does one operation at a time.

L is the latency. Each slice i has an operation of its own that takes it from a lane that holds it
to one that lacks it: it occupies one of the former and one of the latter for e_i = D_i / rate + L
at least, so sets of lanes share their e_i as they share bytes. In one L the devices that have a
slice can double at most: a slice for n receivers that leaves its holders w L before the end leaves
them n / 2^w times (`latency_bound`; a chain of H hops ends as a copy before H - 1 doublings does).
Devices that share two slices or more need L more each, in which they get what others took in. Were
there no bytes, operations would take L each, and a lane do a whole number.     -> _first_seconds()

A device that lacks m slices knows, after an operation, what it and the sender knew before: with h
of them on one holder at most, and R_k on whoever takes in anything after k L,
    R_k+1 = R_k + max(R_k, h), and T >= k L with the first k for which R_k >= m
A ring of n devices, each of which knows R, takes (n - 1) L, in which R grows n times at least.
                                                                                -> _known_seconds()

Where lanes are devices, whatever a host lacks comes to one of its devices by a card at first, and
the others take it in at the rate of a device at best. With D_i bytes for the devices R_i of a host,
and devices S in it, each of which has an operation at least:
    T >= L + (sum over R_i inside S of D_i (1 / card - 1 / device)
              + sum of |R_i and S| D_i / device) / |S|                         -> _device_seconds()

Where lanes are hosts, an operation that feeds b devices of a host takes b L at least, or follows
others that brought its pieces: a host is occupied L for every device in it that needs something. If
a tile has two slices or more, and one host does not feed it from inside, the first device of the
host takes another L: on that host, or on the host whose device passes it the whole tile. If it has
one slice, whoever passes that to the host is occupied as well.
                                                                                -> _host_seconds()

Operations that run at once on N hosts have l_j of them each, sum_j l_j <= N, so with w(l) = l / N,
or floor(l / 2) / floor(N / 2), their w(l_j) add up to 1 at most, and T is at least the sum over all
operations of w(l) times their seconds. A slice of x seconds leaves the hosts that hold it by
operations of its own, for k of the A hosts that lack it,
    x + min over K of (k - 1) x / K + (K + k - 1) L
and what it takes to the other A - k is a share of w(l) / (l - 1), in a ring w(l) / l, for each
byte; one L at least, and one more before a ring, if no tile has another slice. Splitting x over
several k takes longer, as seconds are concave in x.                            -> _shared_seconds()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from resharding.latency_bound import add, late_seconds, with_union
from resharding.minimum_cut import send_seconds
from resharding.network import Links
from resharding.slices import Slice


def blocked_bound(moving: Sequence[Slice], links: Links) -> float:
    """Return seconds that plans for slices with receivers take at least; operations block."""
    bound = max(_first_seconds(moving, links), _known_seconds(moving, links))
    if links.network.issue == "device":
        bound = max(bound, _device_seconds(moving, links))
    if links.network.issue == "host" and links.network.latency:
        bound = max(bound, _host_seconds(moving, links), _shared_seconds(moving, links))
    return bound


def _first_seconds(moving: Sequence[Slice], links: Links) -> float:
    """Return the time of the busiest lanes by what takes slices out of those that hold them."""
    latency, host_of = links.network.latency, links.host_of
    by_host = links.network.issue == "host"
    sending: list[_Operation] = []
    taking: list[_Operation] = []
    for piece in moving:
        hosts = frozenset(host_of[device] for device in piece.holders)
        lacking = tuple(d for d in piece.receivers if not by_host or host_of[d] not in hosts)
        if not lacking:
            continue
        least = piece.num_bytes / _best_rate(hosts, {host_of[d] for d in lacking}, links)
        holders, takers = frozenset(piece.holders), frozenset(lacking)
        if by_host:
            holders, takers = hosts, frozenset(host_of[device] for device in lacking)
        alone = by_host and len(lacking) < len(piece.receivers) + len(piece.in_place)
        # then a device beside a holder may send it along with other slices
        sending.append((holders, len(lacking), least, 0.0 if alone else latency))
        taking.append((takers, len(lacking), least, 0.0 if alone else latency))
    shares: dict[frozenset[int], float] = {}  # where several share several slices
    if not by_host:
        counts = Counter(frozenset(piece.receivers) for piece in moving if not piece.in_place)
        shares = {
            devices: latency * len(devices)
            for devices, count in counts.items()
            if count > 1 and len(devices) > 1
        }
    return max(_busiest(sending, latency, {}), _busiest(taking, latency, shares))


_Operation = tuple[frozenset[int], int, float, float]  # lanes, receivers, seconds of bytes, latency


def _busiest(
    operations: Sequence[_Operation], latency: float, more: Mapping[frozenset[int], float]
) -> float:
    """Return the time of the lanes that share `operations`, and `more` seconds by lanes."""
    lanes = {lane for key, *_ in operations for lane in key}
    bound, alike = 0.0, dict.fromkeys(lanes, 1.0)
    for whole in (False, True):  # all that they take, or how many there are
        if whole and not latency:
            break
        shared = dict(more)
        items: dict[frozenset[int], dict[int, float]] = {}
        for key, count, seconds, start in operations:
            amount = start if whole else seconds + start
            shared[key] = shared.get(key, 0.0) + amount
            add(items.setdefault(key, {}), count, amount)
        found = [send_seconds(shared, alike)]
        for key, each in with_union(items) if latency else ():
            late = late_seconds(sorted(each.items()), len(key), latency, doubles=True)
            found.append(late - latency)
        most = max(found)
        bound = max(bound, math.ceil(most / latency - 1e-6) * latency if whole else most)
    return bound


def _best_rate(holders: Set[int], takers: Set[int], links: Links) -> float:
    """Return the rate of the fastest hop from a device of one set of hosts to one of another."""
    if not holders.isdisjoint(takers):
        return max(links.device_rate.values())

    rate = links.card_rate
    return min(max(rate[host] for host in holders), max(rate[host] for host in takers))


def _known_seconds(moving: Sequence[Slice], links: Links) -> float:
    """Return the time until some device can know something of every slice that it lacks."""
    lacking: dict[int, set[int]] = {}  # device -> slices
    held: dict[int, set[int]] = {}
    for number, piece in enumerate(moving):
        for device in piece.receivers:
            lacking.setdefault(device, set()).add(number)
        for device in piece.holders:
            held.setdefault(device, set()).add(number)
    most = 0
    for slices in set(map(frozenset, lacking.values())):
        first = max(len(slices & known) for known in held.values())
        grown = max((len(slices & held.get(device, set())) for device in lacking), default=0)
        rounds = 0
        while grown < len(slices):
            grown, rounds = grown + max(grown, first), rounds + 1
        most = max(most, rounds)
    return most * links.network.latency


def _device_seconds(moving: Sequence[Slice], links: Links) -> float:
    """Return the time of the busiest devices of a host by what they take in."""
    amounts: dict[int, dict[frozenset[int], float]] = {}  # host -> devices -> bytes that it lacks
    for piece in moving:
        holding = {links.host_of[device] for device in piece.holders}
        inside: dict[int, list[int]] = {}
        for device in piece.receivers:
            inside.setdefault(links.host_of[device], []).append(device)
        for host in inside.keys() - holding:
            key = frozenset(inside[host])
            known = amounts.setdefault(host, {})
            known[key] = known.get(key, 0.0) + piece.num_bytes
    bound = 0.0
    for host, known in amounts.items():
        rate = links.device_rate[next(iter(next(iter(known))))]
        more = 1 / min(rate, links.card_rate[host]) - 1 / rate
        for devices in {*known, frozenset().union(*known)}:
            seconds = 0.0
            for key, amount in known.items():
                seconds += amount * len(key & devices) / rate + amount * more * (key <= devices)
            bound = max(bound, seconds / len(devices))
    return bound + links.network.latency if bound else 0.0


def _host_seconds(moving: Sequence[Slice], links: Links) -> float:
    """Return the time of the busiest host, or of all that receive, by the devices they feed."""
    latency, host_of = links.network.latency, links.host_of
    entering: dict[int, float] = {}  # host -> seconds on its cards
    wanted: dict[int, dict[int, list[int]]] = {}  # host -> device -> slices
    inside: set[tuple[int, int]] = set()  # slices and hosts that hold them
    for number, piece in enumerate(moving):
        holding = {host_of[device] for device in piece.holders}
        inside.update((number, host) for host in holding)
        for device in piece.receivers:
            wanted.setdefault(host_of[device], {}).setdefault(device, []).append(number)
        for host in {host_of[device] for device in piece.receivers} - holding:
            entering[host] = entering.get(host, 0.0) + piece.num_bytes / links.host_rate[host]
    alone = {
        host: entering.get(host, 0.0) + latency * len(devices) for host, devices in wanted.items()
    }
    again = singles = 0  # tiles of several slices, or of one, none of which the host holds
    for host, devices in wanted.items():
        for tile in set(map(tuple, devices.values())):
            if inside.isdisjoint((number, host) for number in tile):
                again += len(tile) > 1
                singles += len(tile) == 1
    starts = sum(map(len, wanted.values())) + again
    hosts = wanted.keys() | {host for _, host in inside}
    return max(
        *alone.values(),
        (sum(entering.values()) + latency * starts) / len(wanted),
        -(-starts // len(wanted)) * latency,
        -(-(starts + singles) // len(hosts)) * latency,
    )


def _shared_seconds(moving: Sequence[Slice], links: Links) -> float:
    """Return the time of all hosts by what takes slices to those that lack them, if no host both
    holds and lacks some."""
    latency, host_of = links.network.latency, links.host_of
    holding = {host_of[device] for piece in moving for device in piece.holders}
    lacking = {host_of[device] for piece in moving for device in piece.receivers}
    if not holding.isdisjoint(lacking):
        return 0.0
    number = len(holding | lacking)
    wanted = Counter(device for piece in moving for device in piece.receivers)
    alike: Counter[tuple[float, int, bool]] = Counter()
    for piece in moving:
        rate = _best_rate({host_of[device] for device in piece.holders}, lacking, links)
        most = len({host_of[device] for device in piece.receivers})
        alone = all(wanted[device] == 1 for device in piece.receivers)
        alike[piece.num_bytes / rate, most, alone] += 1
    return max(
        sum(
            count * _least_share(seconds, most, weights, latency, latency * weights[2] * alone)
            for (seconds, most, alone), count in alike.items()
        )
        for weights in (
            [hosts / number for hosts in range(number + 1)],
            [hosts // 2 / (number // 2) for hosts in range(number + 1)],
        )
    )


def _least_share(
    seconds: float, most: int, weights: Sequence[float], latency: float, again: float
) -> float:
    """Return the least share of the time of all hosts that takes a slice to `most` of them."""
    ring = seconds * min((weights[n] / n for n in range(2, most + 1)), default=math.inf)
    shares = []
    for k in range(1, most + 1):
        fill = (k - 1) * seconds
        few = max(1, math.floor(math.sqrt(fill / latency)))
        first = seconds + min(fill / n + (n + k - 1) * latency for n in (few, few + 1))
        rest, left = 0.0, most - k
        if left:
            copied = seconds * min(weights[n + 1] / n for n in range(1, left + 1))
            rest = again + left * min(copied, ring + again / left)
        shares.append(weights[k + 1] * first + rest)
    return min(shares)
