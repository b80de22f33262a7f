"""Transfers in the order in which lanes that do one at a time get free, cards shared as they are.

A list schedule in the fluid model of `course`: whenever a transfer ends, those that may start now,
and whose hosts or devices are free, do so, the most pressing first. What shares a card keeps its
devices busy for longer, so a transfer is less pressing by those under way on its cards.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence

from attrs import define, evolve, field

from alpa_interchange.reshard import Transfer
from resharding.course import Demand, lanes_of
from resharding.fluid import Fluid
from resharding.network import Links

# How much less pressing, in its own seconds, a transfer is for each one under way on its card: the
# mean of 1,000 random pairs at 10 us with a stream per device is 1.0792 x the bound, with 0 1.0844,
# with 1 1.0794, with 4 1.0789 and the worst 2.07 in place of 1.97.
_CROWDED = 2.0
# By how much the pressure of transfers differs in other orders: with 0.15 and 0.5 that mean is the
# same to 0.02 %.
_SHAKEN = 0.3


def dispatched(
    transfers: Sequence[Transfer],
    demands: Sequence[Demand],
    links: Links,
    limit: float = math.inf,
    shake: int = 0,
) -> tuple[tuple[Transfer, ...], float]:
    """Return `transfers` in the order in which they start, and the seconds that `course` has for
    it; inf where they take `limit` or more. Other numbers of `shake` are other orders."""
    alone = links.network.issue == "host"  # hosts do one at a time, so nothing shares a port
    cards: list[list[int]] = [[] for _ in demands]
    if not alone:
        cards = [[port for port in each.ports if port in links.direction] for each in demands]
    lanes = [lanes_of(transfer, links) for transfer in transfers]
    bit = {lane: 1 << k for k, lane in enumerate(dict.fromkeys(itertools.chain(*lanes)))}
    work = _Work(
        lanes=lanes,
        masks=[sum([bit[lane] for lane in each]) for each in lanes],
        cards=cards,
        seconds=[demand.num_bytes / demand.alone + demand.tail for demand in demands],
        waits=[len(transfer.after) for transfer in transfers],
        dependents=[[] for _ in transfers],
        favour=_favours(len(transfers), shake),
    )
    for index, transfer in enumerate(transfers):
        for earlier in transfer.after:
            work.dependents[earlier].append(index)
    work.weigh()
    fluid, now, left = Fluid(() if alone else demands, links), 0.0, len(transfers)
    tails: list[tuple[float, int]] = []  # (end, transfer), a heap
    order: list[int] = []
    ended = True  # some lane may have become free
    while left and now + work.most_left() < limit:
        for index in work.starts() if ended else ():
            order.append(index)
            if alone:
                heapq.heappush(tails, (now + work.seconds[index], index))
            elif demands[index].num_bytes > 0:
                fluid.start(index)
            else:
                heapq.heappush(tails, (now + demands[index].tail, index))
                work.leave(index)
        horizon = min(tails[0][0] if tails else math.inf, now + fluid.horizon())
        elapsed, now = horizon - now, horizon
        tolerance = 1e-12 * max(now, 1e-9)
        for index in fluid.advance(elapsed, tolerance):
            heapq.heappush(tails, (now + demands[index].tail, index))
            work.leave(index)
        ended = False
        while tails and tails[0][0] <= now + tolerance:
            work.end(heapq.heappop(tails)[1])
            left, ended = left - 1, True
    if left:
        return tuple(transfers), math.inf
    number = {index: k for k, index in enumerate(order)}
    return tuple(_renumbered(transfers[index], number) for index in order), now


def _renumbered(transfer: Transfer, number: dict[int, int]) -> Transfer:
    if not transfer.after:
        return transfer
    return evolve(transfer, after=tuple(sorted(number[k] for k in transfer.after)))


def _favours(count: int, shake: int) -> list[float]:
    """Return what the pressure of each transfer is multiplied by."""
    if not shake:
        return [1.0] * count
    draw = random.Random(shake)
    return [draw.uniform(1 - _SHAKEN, 1 + _SHAKEN) for _ in range(count)]


@define
class _Work:
    """What has not started, and what blocks it."""

    lanes: list[tuple[int, ...]]  # by transfer
    masks: list[int]  # of lanes, a bit for each
    cards: list[list[int]]
    seconds: list[float]  # with the network to itself
    waits: list[int]
    dependents: list[list[int]]
    favour: list[float]
    ready: list[int] = field(factory=list)
    busy: int = 0  # lanes
    load: dict[int, float] = field(factory=dict)  # seconds of a lane
    crowd: dict[int, int] = field(factory=dict)  # transfers whose bytes pass a card
    behind: list[float] = field(factory=list)  # seconds of the longest row that waits for it

    def weigh(self) -> None:
        """Add up loads and rows."""
        self.ready = [index for index, waits in enumerate(self.waits) if not waits]
        self.behind = [0.0] * len(self.waits)
        for index in range(len(self.waits) - 1, -1, -1):
            rows = [self.seconds[k] + self.behind[k] for k in self.dependents[index]]
            self.behind[index] = max(rows, default=0.0)
            for lane in self.lanes[index]:
                self.load[lane] = self.load.get(lane, 0.0) + self.seconds[index]

    def most_left(self) -> float:
        """Return the seconds of the lane that has the most to start."""
        return max(self.load.values(), default=0.0)

    def starts(self) -> list[int]:
        """Return what starts now, and block its lanes."""
        free = [index for index in self.ready if not self.busy & self.masks[index]]
        pressing = {index: self._pressing(index) for index in free}
        made: list[int] = []
        while free:  # what has a lane of its own is as pressing as before, but for its cards
            index = max(free, key=lambda k: (pressing[k] - self._crowded(k), -k))
            made.append(index)
            self.busy |= self.masks[index]
            for lane in self.lanes[index]:
                self.load[lane] -= self.seconds[index]
            for card in self.cards[index]:
                self.crowd[card] = self.crowd.get(card, 0) + 1
            free = [k for k in free if k != index and not self.busy & self.masks[k]]
        started = set(made)
        self.ready = [index for index in self.ready if index not in started]
        return made

    def leave(self, index: int) -> None:
        """Take the bytes of a transfer from its cards."""
        for card in self.cards[index]:
            self.crowd[card] -= 1

    def end(self, index: int) -> None:
        """Free the lanes of a transfer, and what waits for it."""
        self.busy &= ~self.masks[index]
        for other in self.dependents[index]:
            self.waits[other] -= 1
            if not self.waits[other]:
                self.ready.append(other)

    def _pressing(self, index: int) -> float:
        """Return how soon a transfer should start: by the work of its lanes, and what waits for it.

        Means of 1,000 random pairs at 10 us with a stream per device: 1.107 by this, 1.109 by the
        busiest lane alone, 1.110 by all lanes and the row behind, 1.122 by the row behind alone.
        """
        own = [self.load[lane] for lane in self.lanes[index]]
        pressing = 2 * max(own, default=0.0) + sum(own) + 3 * self.behind[index]
        return pressing * self.favour[index]

    def _crowded(self, index: int) -> float:
        """Return how much less pressing a transfer is by what is under way on its cards."""
        cards = self.cards[index]
        if not cards:
            return 0.0
        beside = max([self.crowd.get(card, 0) for card in cards])
        return _CROWDED * beside * self.seconds[index]
