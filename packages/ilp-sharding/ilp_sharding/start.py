"""First choices: a greedy pass over the nodes, and the repair of a previous choice.

Nodes are settled in the order given; each takes the strategy of least cost towards the nodes
already settled (and the least possible towards the others) whose memory still leaves room for the
least usage of everybody not yet settled -> greedy_start(). Where forbidden pairs leave that pass
without a strategy, a second one removes, after every node, all strategies without an allowed
partner, as far as that reaches, and takes the next best where that empties a node
-> consistent_start(). A choice from an earlier, slightly
different problem is settled node by node the same way, keeping what still fits ->
repaired_choice().
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np

from ilp_sharding.instance import Instance, group_minimum
from ilp_sharding.memory import peak_times

_ALTERNATIVES = 4  # strategies tried at a node before the pass gives up


def greedy_start(instance: Instance) -> np.ndarray | None:
    """Return a choice [nodes] of finite cost within the limit, or None if the greedy pass fails."""
    return _settle(instance, None)


def consistent_start(instance: Instance, until: float = math.inf) -> np.ndarray | None:
    """Return a choice [nodes] of finite cost within the limit, or None if this pass fails too.

    Gives up once `time.perf_counter()` passes `until`.
    """
    cost, tables = _split(instance)
    if any(not len(values) for values in cost):
        return None
    allowed = [{other: table < np.inf for other, table in near} for near in tables]
    for node, near in enumerate(tables):
        for other, table in near:  # parallel edges allow what all of them allow
            allowed[node][other] = allowed[node][other] & (table < np.inf)
    alive = [values < np.inf for values in cost]
    if not all(mask.any() for mask in alive) or not _propagate(alive, allowed, range(len(cost))):
        return None
    room = _Room(instance) if math.isfinite(instance.limit) else None
    if room is not None and room.left.min(initial=0.0) < 0:
        return None
    choice = np.full(len(cost), -1, dtype=np.int64)
    for node in range(len(cost)):
        if time.perf_counter() > until:
            return None
        open_here = alive[node] if room is None else alive[node] & room.fits(node)
        total = np.where(open_here, cost[node], np.inf)
        for other, table in tables[node]:
            reach = table[:, choice[other]] if choice[other] >= 0 else table.min(1)
            total = total + reach
        for strategy in np.argsort(total, kind="stable")[:_ALTERNATIVES].tolist():
            if not total[strategy] < np.inf:
                return None
            before = list(alive)
            alive[node] = np.arange(len(total)) == strategy
            if _propagate(alive, allowed, [node]):
                choice[node] = strategy
                break
            alive = before
        else:
            return None
        if room is not None:
            room.take(node, int(choice[node]))
    return choice if instance.objective(choice) < math.inf else None


def _propagate(
    alive: list[np.ndarray], allowed: list[dict[int, np.ndarray]], changed: Iterable[int]
) -> bool:
    """Drop from `alive` what has no allowed partner; return False once a node has nothing left."""
    waiting = dict.fromkeys(changed)
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        mask = alive[node]
        for other, table in allowed[node].items():
            rest = alive[other] & table[mask].any(0)
            if rest.sum() < alive[other].sum():
                if not rest.any():
                    return False
                alive[other] = rest
                waiting[other] = None
    return True


def repaired_choice(instance: Instance, previous: Sequence[int]) -> np.ndarray | None:
    """Return a feasible choice that keeps as much of `previous` as possible, or None."""
    return _settle(instance, list(previous))


def _settle(instance: Instance, previous: list[int] | None) -> np.ndarray | None:
    cost, tables = _split(instance)
    num_nodes = len(cost)
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
        if 0 <= wanted < len(total) and allowed[wanted]:
            strategy = wanted
        else:
            strategy = int(np.argmin(np.where(allowed, total, np.inf)))
        choice[node] = strategy
        if room is not None:
            room.take(node, strategy)
    return choice if instance.objective(choice) < math.inf else None


def _split(
    instance: Instance,
) -> tuple[list[np.ndarray], list[list[tuple[int, np.ndarray]]]]:
    """Return (cost per node, [(other, table [own, other]), ...] per node)."""
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
    return cost, tables


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
