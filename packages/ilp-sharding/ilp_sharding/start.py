"""First choices: a greedy pass over the nodes, and the repair of a previous choice.

Nodes are settled in the order given; each takes the strategy of least cost towards the nodes
already settled (and the least possible towards the others) whose memory still leaves room for the
least usage of everybody not yet settled -> greedy_start(). A choice from an earlier, slightly
different problem is settled node by node the same way, keeping what still fits ->
repaired_choice().
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ilp_sharding.instance import Instance, group_minimum
from ilp_sharding.memory import peak_times


def greedy_start(instance: Instance) -> np.ndarray | None:
    """Return a choice [nodes] of finite cost within the limit, or None if the greedy pass fails."""
    return _settle(instance, None)


def repaired_choice(instance: Instance, previous: Sequence[int]) -> np.ndarray | None:
    """Return a feasible choice that keeps as much of `previous` as possible, or None."""
    return _settle(instance, list(previous))


def _settle(instance: Instance, previous: list[int] | None) -> np.ndarray | None:
    offset = instance.offset.tolist()
    num_nodes = len(offset) - 1
    count = [b - a for a, b in zip(offset, offset[1:], strict=False)]
    bounds = instance.table_offset.tolist()
    tables: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(num_nodes)]
    cost = [instance.cost[a:b] for a, b in zip(offset, offset[1:], strict=False)]
    for e, (a, b) in enumerate(instance.edges.tolist()):
        table = instance.table[bounds[e] : bounds[e + 1]].reshape(count[a], count[b])
        if a == b:
            cost[a] = cost[a] + table.diagonal()
        else:
            tables[a].append((b, table))
            tables[b].append((a, table.T))
    room = _Room(instance) if math.isfinite(instance.limit) else None
    if room is not None and room.left.min(initial=0.0) < 0:
        return None
    choice = np.full(num_nodes, -1, dtype=np.int64)
    for node in range(num_nodes):
        total = cost[node]
        for other, table in tables[node]:
            settled = choice[other]
            total = total + (table[:, settled] if settled >= 0 else table.min(1))
        allowed = total < np.inf
        if room is not None:
            allowed &= room.fits(node)
        if not allowed.any():
            return None
        wanted = previous[node] if previous is not None and node < len(previous) else -1
        if 0 <= wanted < count[node] and allowed[wanted]:
            strategy = wanted
        else:
            strategy = int(np.argmin(np.where(allowed, total, np.inf)))
        choice[node] = strategy
        if room is not None:
            room.take(node, strategy)
    return choice if instance.objective(choice) < math.inf else None


class _Room:
    """What is left of the limit at every peak time when all unsettled nodes use their least."""

    def __init__(self, instance: Instance) -> None:
        self.memory, self.offset = instance.memory, instance.offset
        least = group_minimum(instance.memory, instance.offset)
        live = instance.start < instance.stop
        times = peak_times(instance.start[live], instance.stop[live])
        self.begin = np.searchsorted(times, instance.start)
        self.end = np.where(live, np.searchsorted(times, instance.stop), self.begin)
        changes = np.zeros(len(times) + 1)
        np.add.at(changes, self.begin[live], least[live])
        np.add.at(changes, self.end[live], -least[live])
        self.left = instance.limit - np.cumsum(changes)[: len(times)]
        self.least = least

    def fits(self, node: int) -> np.ndarray:
        """Return for each strategy of `node` whether it keeps the limit."""
        extra = self.memory[self.offset[node] : self.offset[node + 1]] - self.least[node]
        left = self.left[self.begin[node] : self.end[node]]
        return np.asarray(extra <= (left.min() if len(left) else np.inf))

    def take(self, node: int, strategy: int) -> None:
        """Settle `node` on `strategy`."""
        extra = self.memory[self.offset[node] + strategy] - self.least[node]
        self.left[self.begin[node] : self.end[node]] -= extra
