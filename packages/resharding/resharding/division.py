r"""Dividing slices over their holders, and ordering the parts so that no busiest lane waits.

A lane is what cannot do two operations at once: a host whose worker blocks, or one direction of a
network card. Deliveries that the same lanes can send equally fast are one class c of D_c bytes; a
part of x_cs bytes sent from lane s takes x_cs t_cs seconds on s and on every receiving lane.

    shares: min over x of sum over lanes l of load_l^2, sum_s x_cs = D_c: loads as even as holders
        allow, so the largest is the smallest possible                          -> _shares()
    parts: the deliveries of a class stand in a line that is cut where a lane's share ends: of n
        deliveries from m lanes at most n + m - 1                               -> _cut_class()
    order: T = largest load. Always run disjoint parts that cover every lane whose remaining load
        equals the remaining time, until a part ends or another lane becomes such a lane. Where each
        part has one sending and one receiving lane such parts always exist (preemptive open shop,
        Gonzalez and Sahni 1976), and the makespan is T; with wider parts the search over
        disjoint parts is cut off and T may grow                                -> _rounds()

Slices are cut where a round ends inside one. What the rounds say in seconds is turned into boxes of
whole elements, cut along the longest dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from resharding.slices import Box, Cutter, Slice

_PASSES = 60  # of evening out the loads; 4 hosts to 4 hosts settle in under 20
_MOST_TRIED = (
    400  # partial choices of disjoint parts per round; one host to one host needs under 50
)
# Of the makespan: what is left of a part goes along rather than into an operation of its own, which
# would cost a latency for nothing. Smaller values leave slivers behind uneven tiles.
_SLIVER = 4e-3
_EVEN = 1e-9  # seconds, relative to the makespan, that count as none


@frozen(eq=False)
class Delivery:
    """A slice on its way to `receivers`, all of whom one operation feeds from one of `senders`."""

    piece: Slice
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    remote: bool
    gather_seconds: float = 0.0  # spent on the receivers after the bytes have arrived

    def part(self, box: Box) -> Delivery:
        """Return the part of it that is `box`."""
        if box == self.piece.box:
            return self
        piece = self.piece.part(box)
        return Delivery(piece, self.senders, self.receivers, self.remote, self.gather_seconds)


@frozen
class _Part:
    """`seconds` of the `whole` that a delivery takes from one lane."""

    delivery: Delivery
    seconds: float
    whole: float


@frozen
class _Group:
    """All that one lane sends to one set of lanes."""

    lanes: frozenset[int]
    seconds: float
    parts: tuple[_Part, ...]


@frozen
class _Class:
    """Deliveries that the same lanes can send, `cost[lanes]` seconds per byte; `taking` are the
    other lanes of each, whoever sends it."""

    cost: Mapping[frozenset[int], float]
    line: tuple[Delivery, ...]
    taking: Mapping[Delivery, frozenset[int]]
    total: float  # bytes


LanesOf = Callable[[Delivery, int], frozenset[int]]
RateOf = Callable[[Delivery, int], float]


def divided(
    deliveries: Sequence[Delivery], lanes_of: LanesOf, rate_of: RateOf, *, ordered: bool = True
) -> list[tuple[Delivery, int]]:
    """Return parts of `deliveries` in issue order, each with the device that sends it.

    `lanes_of(delivery, sender)` are the lanes a delivery occupies, at `rate_of` bytes/s. If not
    `ordered`, parts are not cut into rounds: for what all starts at once.
    """
    groups = _shares(_classes(deliveries, lanes_of, rate_of))
    queues = [list(group.parts) for group in groups]
    cutters = {delivery: Cutter(delivery.piece.box) for delivery in deliveries}
    sent: dict[int, float] = {}
    found = []
    rounds = _rounds(groups) if ordered else [{k: group.seconds} for k, group in enumerate(groups)]
    for passing in rounds:
        for number, length in passing.items():
            lanes = groups[number].lanes
            for delivery, share in _next_parts(queues[number], length):
                box = cutters[delivery].next(share)
                if box is None:
                    continue
                part = delivery.part(box)
                able = [d for d in delivery.senders if lanes_of(delivery, d) == lanes]
                sender = min(able, key=lambda device: sent.get(device, 0.0))
                sent[sender] = sent.get(sender, 0.0) + part.piece.num_bytes
                found.append((part, sender))
    return found


def _next_parts(queue: list[_Part], room: float) -> Iterator[tuple[Delivery, float]]:
    """Take parts of `room` seconds in all from a queue; yield deliveries and shares of them."""
    while queue and room > 0:
        part = queue[0]
        if part.seconds <= room * (1 + 1e-6):
            queue.pop(0)
            room -= part.seconds
            yield part.delivery, part.seconds / part.whole
        else:
            queue[0] = evolve(part, seconds=part.seconds - room)
            yield part.delivery, room / part.whole
            return


def _classes(deliveries: Sequence[Delivery], lanes_of: LanesOf, rate_of: RateOf) -> list[_Class]:
    """Return the deliveries by the lanes that can send them, those with the fewest first."""
    found: dict[frozenset[tuple[frozenset[int], float]], list[Delivery]] = {}
    taking: dict[Delivery, frozenset[int]] = {}
    for delivery in deliveries:
        rates: dict[frozenset[int], float] = {}
        for sender in delivery.senders:
            lanes = lanes_of(delivery, sender)
            if lanes not in rates:
                rates[lanes] = rate_of(delivery, sender)
        shared = frozenset.intersection(*rates) if len(rates) > 1 else frozenset()
        taking[delivery] = shared
        key = frozenset((lanes - shared, rate) for lanes, rate in rates.items())
        found.setdefault(key, []).append(delivery)
    made = []
    for key, members in found.items():
        ways = sorted(key, key=lambda way: sorted(way[0]))
        made.append(
            _Class(
                cost={lanes: 1 / rate for lanes, rate in ways},
                line=tuple(_interleaved(members)),
                taking=taking,
                total=sum(each.piece.num_bytes for each in members),
            )
        )
    return sorted(made, key=lambda one: (len(one.cost), [sorted(lanes) for lanes in one.cost]))


def _shares(classes: Sequence[_Class]) -> list[_Group]:
    """Return what each lane sends, with the loads of lanes as even as the holders allow."""
    load: dict[int, float] = {}
    for each in classes:
        mean = sum(each.cost.values()) / len(each.cost)
        for delivery in each.line:
            for lane in each.taking[delivery]:
                load[lane] = load.get(lane, 0.0) + delivery.piece.num_bytes * mean
    amounts = [dict.fromkeys(each.cost, 0.0) for each in classes]
    for _ in range(_PASSES):
        moved = 0.0
        for each, amount in zip(classes, amounts, strict=True):
            moved += _level(amount, each.cost, each.total, load)
        if moved <= _EVEN * max(load.values(), default=0.0) or len(classes) == 1:
            break
    groups = []
    for each, amount in zip(classes, amounts, strict=True):
        groups += _cut_class(each, amount)
    return groups


def _level(
    amount: dict[frozenset[int], float],
    cost: Mapping[frozenset[int], float],
    total: float,
    load: dict[int, float],
) -> float:
    """Share `total` bytes out so that the sending lanes end level; return the seconds moved."""
    for lanes, given in amount.items():
        for lane in lanes:
            load[lane] = load.get(lane, 0.0) - given * cost[lanes]
    base = {lanes: max((load[lane] for lane in lanes), default=0.0) for lanes in amount}
    by_base = sorted(amount, key=lambda lanes: base[lanes])
    level, capacity = 0.0, 0.0
    for k in range(len(by_base)):
        capacity = sum(1 / cost[each] for each in by_base[: k + 1])
        level = (total + sum(base[each] / cost[each] for each in by_base[: k + 1])) / capacity
        if k + 1 == len(by_base) or level <= base[by_base[k + 1]]:
            break
    moved = 0.0
    for lanes in amount:
        given = max(0.0, level - base[lanes]) / cost[lanes]
        moved += abs(given - amount[lanes]) * cost[lanes]
        amount[lanes] = given
        for lane in lanes:
            load[lane] += given * cost[lanes]
    return moved


def _cut_class(one: _Class, amount: Mapping[frozenset[int], float]) -> list[_Group]:
    """Return the groups of one class: its deliveries in order, cut where a lane's share ends."""
    parts: dict[frozenset[int], list[_Part]] = {}
    line = one.line
    at, left = 0, line[0].piece.num_bytes if line else 0.0
    ways = [lanes for lanes in amount if amount[lanes] > 0]
    for k, lanes in enumerate(ways):
        room, cost = amount[lanes], one.cost[lanes]
        while at < len(line):
            whole = line[at].piece.num_bytes
            last = k + 1 == len(ways)
            take = left if last else min(left, room)
            if not last and abs(left - take) <= 1e-6 * whole:
                take = left  # no sliver of a slice
            if take > 0:
                used = lanes | one.taking[line[at]]
                parts.setdefault(used, []).append(_Part(line[at], take * cost, whole * cost))
            left, room = left - take, room - take
            if left <= 0:
                at += 1
                left = line[at].piece.num_bytes if at < len(line) else 0.0
            if not last and room <= 1e-6 * whole:
                break
    return [
        _Group(lanes, sum(part.seconds for part in held), tuple(held))
        for lanes, held in parts.items()
    ]


def _interleaved(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return deliveries such that neighbours have different senders and receivers.

    Round k pairs the i-th sender with the (i + k)-th receiver, so devices work side by side.
    """
    senders = {d: k for k, d in enumerate(dict.fromkeys(each.senders[0] for each in deliveries))}
    takers = {d: k for k, d in enumerate(dict.fromkeys(each.receivers[0] for each in deliveries))}
    count = max(len(senders), len(takers), 1)

    def place(delivery: Delivery) -> tuple[int, int]:
        a, b = senders[delivery.senders[0]], takers[delivery.receivers[0]]
        return (b - a) % count, a

    return sorted(deliveries, key=place)


def _rounds(groups: Sequence[_Group]) -> list[dict[int, float]]:
    """Return what runs side by side in one round after the other: seconds by group."""
    left = [group.seconds for group in groups]
    load: dict[int, float] = {}
    for group in groups:
        for lane in group.lanes:
            load[lane] = load.get(lane, 0.0) + group.seconds
    remaining = max(load.values(), default=0.0)
    tiny, sliver = _EVEN * remaining, _SLIVER * remaining
    idle = [k for k, group in enumerate(groups) if not group.lanes or group.seconds <= 0]
    rounds = [{k: groups[k].seconds} for k in idle]
    open_groups = [k for k in range(len(groups)) if k not in idle]
    before: tuple[int, ...] = ()
    while open_groups:
        critical = {lane for lane, seconds in load.items() if seconds >= remaining - sliver}
        chosen = _disjoint(groups, open_groups, left, load, critical, before)
        used = frozenset(itertools.chain.from_iterable(groups[k].lanes for k in chosen))
        length = min(left[k] for k in chosen)
        idle_loads = [seconds for lane, seconds in load.items() if lane not in used]
        slack = remaining - max(idle_loads, default=0.0)
        if slack > sliver:  # else some busiest lane had to stay idle, and T grows
            length = min(length, slack)
        passing = {k: left[k] if left[k] <= length + sliver else length for k in chosen}
        rounds.append(passing)
        for k, passed in passing.items():
            left[k] -= passed
            for lane in groups[k].lanes:
                load[lane] -= passed
        remaining = max(max(load.values()), remaining - length)
        open_groups = [k for k in open_groups if left[k] > tiny]
        before = chosen
    return rounds


def _disjoint(
    groups: Sequence[_Group],
    open_groups: Sequence[int],
    left: Sequence[float],
    load: dict[int, float],
    critical: set[int],
    before: tuple[int, ...],
) -> tuple[int, ...]:
    """Return disjoint groups that cover all `critical` lanes, or as many as were found."""
    ranked = sorted(
        open_groups,
        key=lambda k: (k in before, max(load[lane] for lane in groups[k].lanes), left[k]),
        reverse=True,
    )
    covers = {lane: [k for k in ranked if lane in groups[k].lanes] for lane in critical}
    best: tuple[int, ...] = ()
    best_covered, tried = -1, 0

    def search(chosen: tuple[int, ...], used: frozenset[int], open_lanes: frozenset[int]) -> bool:
        nonlocal best, best_covered, tried
        tried += 1
        covered = len(critical) - len(open_lanes - used)
        if covered > best_covered:
            best, best_covered = chosen, covered
        todo = open_lanes - used
        if not todo or tried > _MOST_TRIED:
            return not todo
        choices = {
            lane: [k for k in covers[lane] if used.isdisjoint(groups[k].lanes)] for lane in todo
        }
        lane = min(todo, key=lambda each: (len(choices[each]), each))
        for k in choices[lane]:
            if search((*chosen, k), used | groups[k].lanes, todo):
                return True
        if not choices[lane]:
            return search(chosen, used, todo - {lane}) and False
        return False

    search((), frozenset(), frozenset(critical))
    taken = list(best)
    used = frozenset(itertools.chain.from_iterable(groups[k].lanes for k in taken))
    for k in ranked:
        if used.isdisjoint(groups[k].lanes):
            taken.append(k)
            used |= groups[k].lanes
    return tuple(taken)
