"""Flows that share ports max-min fairly: fill all evenly, freeze those at a port that runs full.

Flows through the same ports have the same rate, so they are a *bundle*: what one of them has
carried since the beginning is kept once for all, and each ends when that reaches its own mark.

The port of a device is left out where all that passes it also passes the cards of its host in one
direction, which together carry no more than the port: a card is full before it. What is left makes
chains that differ in the order of devices a bundle.                            -> _never_full()
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from resharding.network import Links

# Bundles from which arrays share ports in place of loops: with 12 to 40 the 70 slowest of 1,000
# random pairs are planned in the same time to 4 %.
_MANY = 28


class Use(Protocol):
    """What a flow asks of the ports; see `resharding.course.Demand`."""

    @property
    def num_bytes(self) -> float: ...
    @property
    def ports(self) -> tuple[int, ...]: ...
    @property
    def times(self) -> tuple[int, ...]: ...


class _Bundle:
    """Flows through the same ports; `ends` is a heap of (bytes carried when it ends, flow)."""

    __slots__ = ("carried", "ends", "number", "passes", "rate")

    def __init__(self, number: int, passes: tuple[tuple[int, int], ...]) -> None:
        self.number, self.passes = number, passes  # (port, times)
        self.carried, self.rate = 0.0, 0.0
        self.ends: list[tuple[float, int]] = []


class Fluid:
    """The flows that run at present, of all those that `demands` describe."""

    def __init__(self, demands: Sequence[Use], links: Links) -> None:
        self._rate = links.rate
        uses = [(demand.ports, demand.times) for demand in demands]
        ways = dict.fromkeys(uses)
        left_out = _never_full(ways, links)
        known: dict[tuple[tuple[int, int], ...], _Bundle] = {}
        bundle_of: dict[tuple[tuple[int, ...], tuple[int, ...]], _Bundle] = {}
        for way in ways:
            passes = tuple([use for use in zip(*way, strict=True) if use[0] not in left_out])
            bundle = known.get(passes)
            if bundle is None:
                bundle = known[passes] = _Bundle(len(known), passes)
            bundle_of[way] = bundle
        self._bundles = [bundle_of[way] for way in uses]
        self._bytes = [demand.num_bytes for demand in demands]
        self._running: dict[int, _Bundle] = {}
        self._stale = False
        self._arrays: _Arrays | None = None
        self._known = known

    def start(self, index: int) -> None:
        """Let flow `index` run."""
        bundle = self._bundles[index]
        heapq.heappush(bundle.ends, (bundle.carried + self._bytes[index], index))
        self._running[bundle.number] = bundle
        self._stale = True

    def horizon(self) -> float:
        """Return the seconds until the next flow ends; inf if none runs."""
        if self._stale:
            self._share()
        return min(
            [(each.ends[0][0] - each.carried) / each.rate for each in self._running.values()],
            default=math.inf,
        )

    def advance(self, seconds: float, tolerance: float) -> list[int]:
        """Let time pass; return the flows that have ended, or will within `tolerance` seconds."""
        ended: list[int] = []
        for bundle in list(self._running.values()):
            bundle.carried += bundle.rate * seconds
            ends, mark = bundle.ends, bundle.carried + bundle.rate * tolerance
            while ends and ends[0][0] <= mark:
                ended.append(heapq.heappop(ends)[1])
                self._stale = True
            if not ends:
                del self._running[bundle.number]
        return ended

    def _share(self) -> None:
        """Set the rates of the flows that run."""
        self._stale = False
        bundles = list(self._running.values())
        if len(bundles) < _MANY:
            _share(bundles, self._rate)
            return
        if self._arrays is None:
            self._arrays = _Arrays(list(self._known), self._rate)
        rates = self._arrays.share({each.number: len(each.ends) for each in bundles})
        for each, value in zip(bundles, rates, strict=True):
            each.rate = value


def _never_full(ways: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], links: Links) -> set[int]:
    """Return ports of devices that no flow waits for; `ways`: (ports, times) of flows."""
    direction, roomy = links.direction, links.roomy
    if not roomy:
        return set()
    covered: dict[int, int] = {}  # 1: all pass cards that receive, 2: that send, 3: both
    for ports, times in ways:
        sides = {direction[port] for port in ports if port in direction}
        for port, count in zip(ports, times, strict=True):
            host = roomy.get(port)
            if host is None:
                continue
            found = 0
            if count == 1:
                found = (2 * host in sides) | (2 * host + 1 in sides) << 1
            covered[port] = covered.get(port, 3) & found
    return {port for port, sides in covered.items() if sides}


def _share(bundles: Sequence[_Bundle], rate: Sequence[float]) -> None:
    users: dict[int, int] = {}
    for bundle in bundles:
        count = len(bundle.ends)
        for port, times in bundle.passes:
            users[port] = users.get(port, 0) + times * count
    room = {port: rate[port] for port in users}
    active, level = bundles, 0.0
    while active:
        tightest = min([room[port] / count for port, count in users.items()])
        level = max(level, tightest)  # rounding may not lower it
        limit = level * (1 + 1e-12)
        full = {port for port, count in users.items() if room[port] <= limit * count}
        still = []
        for bundle in active:
            for port, _ in bundle.passes:
                if port in full:
                    break
            else:
                still.append(bundle)
                continue
            bundle.rate, count = level, len(bundle.ends)
            for port, times in bundle.passes:
                room[port] -= level * times * count
                users[port] -= times * count
        users = {port: count for port, count in users.items() if count}
        active = still


class _Arrays:
    """The ports of all bundles: an entry per bundle and port."""

    def __init__(self, passes: Sequence[Sequence[tuple[int, int]]], rate: Sequence[float]) -> None:
        pairs = [(k, port, times) for k, each in enumerate(passes) for port, times in each]
        table: NDArray[np.int64] = np.array(pairs, dtype=np.int64).reshape(-1, 3)
        self._row, self._port, self._times = table[:, 0], table[:, 1], table[:, 2].astype(float)
        self._count = len(passes)
        self._rate = np.array(rate, dtype=float)

    def share(self, flows: dict[int, int]) -> list[float]:
        """Return the rate of a flow of each bundle; `flows`: how many run, by bundle."""
        count = np.zeros(self._count)
        numbers = list(flows)
        count[numbers] = list(flows.values())
        there = count[self._row] > 0
        row, port = self._row[there], self._port[there]
        weight = self._times[there] * count[row]
        room, level, found = self._rate.copy(), 0.0, np.zeros(self._count)
        users = np.bincount(port, weight, len(room))
        while len(row):
            quotient = np.full(len(room), np.inf)
            np.divide(room, users, out=quotient, where=users > 0.5)
            level = max(level, float(quotient.min()))
            found[row[(quotient <= level * (1 + 1e-12))[port]]] = level
            goes_on = found[row] == 0.0
            ends = ~goes_on
            gone = np.bincount(port[ends], weight[ends], len(room))
            room -= level * gone
            users -= gone
            row, port, weight = row[goes_on], port[goes_on], weight[goes_on]
        rates: list[float] = found[numbers].tolist()
        return rates
