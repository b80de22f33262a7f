"""The memory limit over the strategies still open, as sparse changes in time.

Only times at which usage can newly peak matter: the live set grows until something is freed, so the
last start before every stop dominates the times since the previous stop -> peak_times(). Between
consecutive such times a strategy's usage is stored as differences (strategy, time, change), over
its node and everything contracted into it; the part every strategy of a node pays is subtracted
from the limit -> MemoryProfile.
"""

from __future__ import annotations

import math

import numpy as np

from ilp_sharding.problem.instance import Instance, group_minimum
from ilp_sharding.problem.reduction import Network


def peak_times(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the increasing times whose live sets contain every other time's live set.

    `start`, `stop`: half-open non-empty intervals.
    """
    times = np.concatenate([start, stop])
    stops = np.concatenate([np.zeros(len(start), bool), np.ones(len(stop), bool)])
    order = np.lexsort((~stops, times))
    times, stops = times[order], stops[order]
    # a start followed by a stop (in time order, stops first at equal times) is a peak
    peaks = np.flatnonzero(~stops[:-1] & stops[1:])
    found = times[peaks]  # increasing; `np.unique` would first load numpy's masked arrays
    return found[np.append(True, found[1:] != found[:-1])] if len(found) else found


# Entries of the dense [times, strategies] usage (240 MB of float64) up to which it is made.
DENSE_USAGE = 3e7


class MemoryProfile:
    """Usage over peak times of the open strategies of a `Network`.

    `nodes`: open nodes in order; `offset` [nodes + 1] into the strategies; entries `strategy`,
    `time`, `change` sorted by strategy then time; `slack` [times] = limit less what is always used.
    `exact`: sums of memory are exact integers.
    """

    def __init__(self, instance: Instance, network: Network) -> None:
        self.limit = instance.limit
        self.exact = exact_memory(instance)
        self.nodes = network.open_nodes()
        sizes = [len(network.cost[i]) for i in self.nodes]
        self.offset = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        live = np.flatnonzero(
            (instance.start < instance.stop) & (group_maximum(instance.memory, instance.offset) > 0)
        )
        self.times = peak_times(instance.start[live], instance.stop[live])
        # first peak time at or after start; first at or after stop
        begin = np.searchsorted(self.times, instance.start[live])
        end = np.searchsorted(self.times, instance.stop[live])
        root, full = network.maps()
        position = np.full(network.num_nodes, -1)
        position[self.nodes] = np.arange(len(self.nodes))
        tops = root[live]
        own = [full[node][network.kept[top]] for node, top in zip(live, tops, strict=True)]
        size = np.array([len(part) for part in own], dtype=np.int64)
        bounds = np.concatenate([[0], np.cumsum(size)])
        chosen = np.concatenate([np.zeros(0, np.int64), *own])
        usage = instance.memory[np.repeat(instance.offset[live], size) + chosen]
        least = group_minimum(usage, bounds)
        base = np.bincount(begin, weights=least, minlength=len(self.times) + 1)
        base -= np.bincount(end, weights=least, minlength=len(self.times) + 1)
        self.slack = self.limit - np.cumsum(base)[: len(self.times)]
        extra = usage - np.repeat(least, size)
        # a settled node has one strategy and so no more than the least
        varying = np.flatnonzero(extra)
        owner = np.repeat(np.arange(len(live)), size)[varying]
        column = self.offset[position[tops[owner]]] + varying - bounds[owner]
        self._set(
            np.concatenate([column, column]),
            np.concatenate([begin[owner], end[owner]]),
            np.concatenate([extra[varying], -extra[varying]]),
        )

    @property
    def num_times(self) -> int:
        return len(self.times)

    def usage(self, weight: np.ndarray) -> np.ndarray:
        """Return usage [times] beyond the base when strategy v is used `weight[v]` times."""
        changes = np.bincount(
            self.time, weights=self.change * weight[self.strategy], minlength=self.num_times + 1
        )
        return np.cumsum(changes)[: self.num_times]

    def row(self, time: int) -> np.ndarray:
        """Return the usage [strategies] at peak time `time`."""
        until = self.time <= time
        dense = np.bincount(
            self.strategy[until], weights=self.change[until], minlength=int(self.offset[-1])
        )
        if not np.array_equal(self.change, np.rint(self.change)):
            dense[np.abs(dense) < 1e-9 * np.abs(self.change).max()] = 0.0
        return dense

    @property
    def dense_size(self) -> float:
        """The entries of the dense usage [times, strategies]."""
        return self.num_times * float(self.offset[-1])

    def allowed(self) -> np.ndarray:
        """Return `slack` plus how far a sum of float usages may come out above it by rounding."""
        if self.exact or not math.isfinite(self.limit):
            return self.slack
        return np.asarray(self.slack + 1e-12 * abs(self.limit))

    def indicator(self, chosen: np.ndarray) -> np.ndarray:
        """Return the 0/1 weights [strategies] of a choice [open nodes] of positions."""
        weight = np.zeros(int(self.offset[-1]))
        weight[self.offset[:-1] + chosen] = 1.0
        return weight

    def _set(self, strategy: np.ndarray, time: np.ndarray, change: np.ndarray) -> None:
        inside = time < self.num_times
        strategy, time, change = strategy[inside], time[inside], change[inside]
        order = np.lexsort((time, strategy))
        self.strategy, self.time, self.change = strategy[order], time[order], change[order]


def violated_peaks(excess: np.ndarray, most: int) -> list[int]:
    """Return up to `most` times, worst first, one per run of consecutive times with excess."""
    over = np.flatnonzero(excess > 0.0)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    peaks = [int(run[np.argmax(excess[run])]) for run in runs]
    return sorted(peaks, key=lambda t: -float(excess[t]))[:most]


def group_maximum(values: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the largest value of every group `values[offset[g]:offset[g + 1]]`."""
    return -group_minimum(-values, offset)


def exact_memory(instance: Instance) -> bool:
    """Return whether memory sums are exact integers."""
    largest = float(np.abs(instance.memory).max(initial=0.0))
    integers = np.array_equal(instance.memory, np.rint(instance.memory))
    return integers and largest * max(instance.num_nodes, 1) < 2.0**52


def dense_usage(memory: MemoryProfile) -> np.ndarray:
    """Return usage [times, strategies] beyond the base."""
    dense = np.zeros((memory.num_times + 1, int(memory.offset[-1])))
    np.add.at(dense, (memory.time, memory.strategy), memory.change)
    dense = np.cumsum(dense, axis=0)[: memory.num_times]
    if not np.array_equal(memory.change, np.rint(memory.change)):
        dense[np.abs(dense) < 1e-9 * max(float(np.abs(memory.change).max()), 1e-300)] = 0.0
    return dense


def binding_rows(memory: MemoryProfile) -> tuple[np.ndarray, np.ndarray]:
    """Return (usage [times, strategies], slack [times]) of the times some choice can exceed."""
    if memory.dense_size > DENSE_USAGE:
        raise MemoryError("too many strategies and times for the direct method")
    usage = dense_usage(memory)
    slack = memory.allowed()
    if not len(memory.nodes):
        binding = slack < 0
    else:
        binding = np.maximum.reduceat(usage, memory.offset[:-1], axis=1).sum(1) > slack
    usage, slack = usage[binding], slack[binding]
    same = (
        np.flatnonzero((np.diff(usage, axis=0) == 0).all(1)) if len(slack) > 1 else np.zeros(0, int)
    )
    for t in same[::-1]:
        slack[t] = min(slack[t], slack[t + 1])
    keep = np.ones(len(slack), bool)
    keep[same + 1] = False
    return usage[keep], slack[keep]
