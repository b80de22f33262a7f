"""First choices: a greedy pass over the nodes, and the repair of a previous choice.

Nodes are settled in the order given; each takes the strategy of least cost towards the nodes
already settled (and the least possible towards the others) whose memory still leaves room for the
least usage of everybody not yet settled -> greedy_start(). Where forbidden pairs leave that pass
without a strategy, a second one over the reduced network removes, after every node, all strategies
without an allowed partner, as far as that reaches, and takes the next best where that empties a
node -> consistent_start(). A choice from an earlier, slightly different problem is settled node by
node the same way, keeping what still fits -> repaired_choice().
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ilp_sharding.instance import Instance, group_minimum
from ilp_sharding.memory import MemoryProfile, peak_times
from ilp_sharding.network import Network

_ALTERNATIVES = 4  # strategies tried at a node before the pass gives up


def greedy_start(instance: Instance, until: float = math.inf) -> np.ndarray | None:
    """Return a choice [nodes] of finite cost within the limit, or None if the greedy pass fails.

    Gives up once `time.perf_counter()` passes `until`.
    """
    return _settle(instance, None, until)


def repaired_choice(
    instance: Instance, previous: Sequence[int], until: float = math.inf
) -> np.ndarray | None:
    """Return a feasible choice that keeps as much of `previous` as possible, or None."""
    return _settle(instance, list(previous), until)


def consistent_start(
    network: Network,
    memory: MemoryProfile | None,
    until: float = math.inf,
    ahead: Mapping[tuple[int, int], np.ndarray] | None = None,
) -> dict[int, int] | None:
    """Return {open node: position} of a choice within the limit, or None if this pass fails too.

    `memory` is None without a limit. `ahead[node, other]` [strategies of node] is what each of them
    is taken to cost towards an unsettled `other` and beyond; if None, the least entry of its table.
    Gives up once `time.perf_counter()` passes `until`.
    """
    nodes = network.open_nodes()
    allowed: list[Mapping[int, np.ndarray]] = [{} for _ in range(network.num_nodes)]
    for node in nodes:  # as numbers: a product with a mask counts allowed partners
        if time.perf_counter() > until:
            return None
        allowed[node] = {
            other: (table < np.inf).astype(np.float32)
            for other, table in network.tables[node].items()
        }
    room = None if memory is None else _NetworkRoom(memory, until)
    if room is not None and room.left.min(initial=0.0) < 0:
        return None
    alive = {node: np.ones(len(network.cost[node]), bool) for node in nodes}
    chosen: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if time.perf_counter() > until:
            return None
        open_here = alive[node] if room is None else alive[node] & room.fits(place)
        total = np.where(open_here, network.cost[node], np.inf)
        for other, table in network.tables[node].items():
            if other in chosen:
                total = total + table[:, chosen[other]]
            else:
                total = total + (table.min(1) if ahead is None else ahead[node, other])
        for strategy in np.argsort(total, kind="stable")[:_ALTERNATIVES].tolist():
            if not total[strategy] < np.inf:
                return None
            before = dict(alive)
            alive[node] = np.arange(len(total)) == strategy
            if _propagate(alive, allowed, [node]):
                chosen[node] = strategy
                break
            alive = before
        else:
            return None
        if room is not None:
            room.take(place, chosen[node])
    return chosen


def _propagate(
    alive: dict[int, np.ndarray],
    allowed: Sequence[Mapping[int, np.ndarray]],
    changed: Iterable[int],
) -> bool:
    """Drop from `alive` what has no allowed partner; return False once a node has nothing left."""
    waiting = dict.fromkeys(changed)
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        mask = alive[node].astype(np.float32)
        for other, table in allowed[node].items():
            kept = alive[other]
            rest = kept & (mask @ table > 0)
            count = np.count_nonzero(rest)
            if count < np.count_nonzero(kept):
                if not count:
                    return False
                alive[other] = rest
                waiting[other] = None
    return True


def _settle(instance: Instance, previous: list[int] | None, until: float) -> np.ndarray | None:
    num_nodes = instance.num_nodes
    room = _Room(instance) if math.isfinite(instance.limit) else None
    if room is not None and room.left.min(initial=0.0) < 0:
        return None
    offset, bounds = instance.offset.tolist(), instance.table_offset.tolist()
    ends = instance.edges.tolist()
    incident, incident_start = _incident_edges(instance)
    table, least, least_start = instance.table, *_row_minima(instance)
    choice = [-1] * num_nodes
    for node in range(num_nodes):
        if time.perf_counter() > until:
            return None
        total = instance.cost[offset[node] : offset[node + 1]]
        size = len(total)
        for e in incident[incident_start[node] : incident_start[node + 1]]:
            first, second = ends[e]
            start, stop = bounds[e], bounds[e + 1]
            if first == second:
                total = total + table[start : stop : size + 1]
            elif first == node:
                settled = choice[second]
                if settled >= 0:
                    total = total + table[start + settled : stop : (stop - start) // size]
                else:
                    total = total + least[least_start[e] : least_start[e + 1]]
            else:
                settled = choice[first]
                if settled >= 0:
                    total = total + table[start + settled * size : start + (settled + 1) * size]
                else:
                    total = total + table[start:stop].reshape(-1, size).min(0)
        if room is not None:
            total = np.where(room.fits(node), total, np.inf)
        wanted = previous[node] if previous is not None and node < len(previous) else -1
        if not (0 <= wanted < size and total[wanted] < np.inf):
            wanted = int(total.argmin())
            if not total[wanted] < np.inf:
                return None
        choice[node] = wanted
        if room is not None:
            room.take(node, wanted)
    found = np.array(choice, dtype=np.int64)
    return found if instance.objective(found) < math.inf else None


def _incident_edges(instance: Instance) -> tuple[list[int], list[int]]:
    """Return (edges by node, start of each node's), self-edges once."""
    edges = instance.edges
    number = np.arange(len(edges))
    apart = edges[:, 0] != edges[:, 1]
    node = np.concatenate([edges[:, 0], edges[apart, 1]])
    order = np.argsort(node, kind="stable")
    degree = np.bincount(node, minlength=instance.num_nodes)
    by_node = np.concatenate([number, number[apart]])[order]
    return by_node.tolist(), np.append(0, np.cumsum(degree)).tolist()


def _row_minima(instance: Instance) -> tuple[np.ndarray, list[int]]:
    """Return (least entry of every row of every table, start of each table's)."""
    count = np.diff(instance.offset)
    rows, width = count[instance.edges[:, 0]], count[instance.edges[:, 1]]
    starts = np.append(0, np.cumsum(rows))
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], rows)
    begin = np.repeat(instance.table_offset[:-1], rows) + place * np.repeat(width, rows)
    least = np.minimum.reduceat(instance.table, begin) if len(begin) else np.zeros(0)
    return least, starts.tolist()


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


class _NetworkRoom:
    """The same for the open nodes of a reduced network, whose usage changes at several times.

    Left unfinished once `time.perf_counter()` passes `until`.
    """

    def __init__(self, memory: MemoryProfile, until: float) -> None:
        num_times = memory.num_times
        self.left = memory.slack.copy()
        self._blocks: list[tuple[np.ndarray, np.ndarray]] = []
        bounds = np.searchsorted(memory.strategy, memory.offset)
        for node, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if time.perf_counter() > until:
                return
            first, last = memory.offset[node : node + 2]
            times = np.array(sorted(set(memory.time[start:stop].tolist())), dtype=np.int64)
            column = np.searchsorted(times, memory.time[start:stop])
            extra = np.zeros((last - first, len(times)))  # usage from each time to the next
            changed = memory.strategy[start:stop] - first
            np.add.at(extra, (changed, column), memory.change[start:stop])
            extra = np.cumsum(extra, axis=1)
            least = extra.min(0)
            ends = np.append(times, num_times)
            for begin, end, usage in zip(ends, ends[1:], least, strict=False):
                self.left[begin:end] -= usage
            self._blocks.append((ends, extra - least))

    def fits(self, node: int) -> np.ndarray:
        """Return for each strategy of the open node at place `node` whether it keeps the limit."""
        ends, extra = self._blocks[node]
        if len(ends) < 2:
            return np.ones(len(extra), bool)
        return np.asarray((extra <= np.minimum.reduceat(self.left, ends[:-1])).all(1))

    def take(self, node: int, strategy: int) -> None:
        """Settle the node on `strategy`."""
        ends, extra = self._blocks[node]
        for begin, end, usage in zip(ends, ends[1:], extra[strategy], strict=False):
            self.left[begin:end] -= usage
