"""Strategies and times that cannot matter, removed from a table graph, compiled.

Strategy b of a node goes if another strategy a is no worse whatever the neighbours do,

    cost_a - cost_b + sum over edges of max_l [ theta(a, l) - theta(b, l) ]  <=  0,

and uses no more memory at any time -> remove_dominated(). A strategy without an allowed partner on
some edge goes too -> graph_loops, and one that exceeds a memory row even if all other nodes
use their least -> drop_oversized(). A time goes if even the largest usages fit, or if a
neighbouring time with no more slack has at least the usage of every strategy -> drop_times().
"""

from __future__ import annotations

import math
import time

import numpy as np
from attrs import evolve
from numba import njit

from ilp_sharding.problem.flat_graph import Rows, TableGraph, Tables, make_rows
from ilp_sharding.problem.graph_loops import drop_unsupported

_BLOCK = 64  # times whose least is taken at once
_WORK = 2e9  # elementary steps a pass of dominance may take,
_WORK_PER_SECOND = 2e8  # about


@njit(cache=True)
def uses_no_more(rows: Rows, a: int, b: int) -> bool:
    """Return whether strategy a uses at most the memory of strategy b at every time."""
    p, p_stop = rows.start[a], rows.start[a + 1]
    q, q_stop = rows.start[b], rows.start[b + 1]
    far = len(rows.slack)
    total = 0.0
    largest = 0.0
    while p < p_stop or q < q_stop:
        now = far
        if p < p_stop:
            now = rows.time[p]
        if q < q_stop and rows.time[q] < now:
            now = rows.time[q]
        if p < p_stop and rows.time[p] == now:
            total += rows.change[p]
            largest = max(largest, abs(rows.change[p]))
            p += 1
        if q < q_stop and rows.time[q] == now:
            total -= rows.change[q]
            largest = max(largest, abs(rows.change[q]))
            q += 1
        if total > 1e-9 * largest:
            return False
    return True


@njit(cache=True)
def _row_excess(tables: Tables, active: np.ndarray, i: int, a: int, b: int) -> float:
    """Return the worst cost of strategy a over b of node i on its edges."""
    offset = tables.offset
    size = offset[i + 1] - offset[i]
    total = 0.0
    for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
        e = tables.incident[z]
        p = tables.entry_offset[e]
        worst = -np.inf
        if tables.first[e] == i:
            j = tables.second[e]
            base, width = offset[j], offset[j + 1] - offset[j]
            for q in range(width):
                other = tables.entry[p + b * width + q]
                if active[base + q] and other < np.inf:
                    worst = max(worst, tables.entry[p + a * width + q] - other)
        else:
            j = tables.first[e]
            base = offset[j]
            for q in range(offset[j + 1] - base):
                other = tables.entry[p + q * size + b]
                if active[base + q] and other < np.inf:
                    worst = max(worst, tables.entry[p + q * size + a] - other)
        total += worst
        if total == np.inf:
            return total
    return total


@njit(cache=True)
def remove_dominated(tables: Tables, rows: Rows, active: np.ndarray, work_limit: float) -> int:
    """Clear `active` [strategies] for dominated strategies; return how many."""
    offset = tables.offset
    num_nodes = len(offset) - 1
    waiting = np.ones(num_nodes, np.bool_)
    queue = np.arange(num_nodes + 1)
    head, waiting_count = 0, num_nodes
    removed = 0
    work = 0.0
    while waiting_count > 0 and work < work_limit:
        i = queue[head]
        head = (head + 1) % (num_nodes + 1)
        waiting_count -= 1
        waiting[i] = False
        size = offset[i + 1] - offset[i]
        degree = tables.incident_offset[i + 1] - tables.incident_offset[i]
        found = False
        for b in range(size):
            if not active[offset[i] + b]:
                continue
            for a in range(size):
                if a == b or not active[offset[i] + a]:
                    continue
                work += 4.0 + 16.0 * degree
                if not uses_no_more(rows, offset[i] + a, offset[i] + b):
                    continue
                difference = tables.cost[offset[i] + a] - tables.cost[offset[i] + b]
                if difference + _row_excess(tables, active, i, a, b) <= 0.0:
                    active[offset[i] + b] = False
                    removed += 1
                    found = True
                    break
        if found:
            for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
                e = tables.incident[z]
                j = tables.second[e] if tables.first[e] == i else tables.first[e]
                if not waiting[j]:
                    waiting[j] = True
                    queue[(head + waiting_count) % (num_nodes + 1)] = j
                    waiting_count += 1
    return removed


@njit(cache=True)
def _change_times(rows: Rows, begin: int, end: int, out: np.ndarray) -> int:
    """Write the different times of the changes `begin` to `end` in order; return how many."""
    count = 0
    for p in range(begin, end):
        time = rows.time[p]
        place = count
        while place > 0 and out[place - 1] > time:
            place -= 1
        if place > 0 and out[place - 1] == time:
            continue
        for q in range(count, place, -1):
            out[q] = out[q - 1]
        out[place] = time
        count += 1
    return count


@njit(cache=True)
def _block_minima(values: np.ndarray) -> np.ndarray:
    """Return the least of every `_BLOCK` values in a row."""
    result = np.full(len(values) // _BLOCK + 1, np.inf)
    for t in range(len(values)):
        result[t // _BLOCK] = min(result[t // _BLOCK], values[t])
    return result


@njit(cache=True)
def _least(values: np.ndarray, blocks: np.ndarray, start: int, stop: int) -> float:
    """Return the least of `values[start:stop]`, whole blocks of it taken from `blocks`."""
    least = np.inf
    t = start
    while t < stop:
        if t % _BLOCK == 0 and t + _BLOCK <= stop:
            least = min(least, blocks[t // _BLOCK])
            t += _BLOCK
        else:
            least = min(least, values[t])
            t += 1
    return least


@njit(cache=True)
def least_usage(offset: np.ndarray, rows: Rows, active: np.ndarray) -> np.ndarray:
    """Return the sum over nodes of the least usage [times] of any of their active strategies."""
    num_times = len(rows.slack)
    changes = np.zeros(num_times + 1)
    times = np.empty(num_times + 1, np.int64)
    for i in range(len(offset) - 1):
        begin, end = rows.start[offset[i]], rows.start[offset[i + 1]]
        if begin == end:
            continue
        count = _change_times(rows, begin, end, times)
        low = np.full(count, np.inf)
        for v in range(offset[i], offset[i + 1]):
            if not active[v]:
                continue
            total = 0.0
            p = rows.start[v]
            for s in range(count):
                if p < rows.start[v + 1] and rows.time[p] == times[s]:
                    total += rows.change[p]
                    p += 1
                low[s] = min(low[s], total)
        before = 0.0
        for s in range(count):
            changes[times[s]] += low[s] - before
            before = low[s]
    return np.cumsum(changes)[:num_times]


@njit(cache=True)
def drop_oversized(offset: np.ndarray, rows: Rows, active: np.ndarray, margin: float) -> int:
    """Clear `active` for strategies that exceed a row even with every other node at its least.

    Returns how many were cleared, or -1 if a node has none left. `margin` allows for rounding.
    """
    num_times = len(rows.slack)
    cleared = 0
    times = np.empty(num_times + 1, np.int64)
    while True:
        room = rows.slack - least_usage(offset, rows, active)
        blocks = _block_minima(room)
        if num_times and np.min(room) < -margin:
            return -1
        before = cleared
        for i in range(len(offset) - 1):
            begin, end = rows.start[offset[i]], rows.start[offset[i + 1]]
            if begin == end:
                continue
            count = _change_times(rows, begin, end, times)
            low = np.full(count, np.inf)
            tight = np.full(count, np.inf)
            usage = np.zeros((offset[i + 1] - offset[i], count))
            for v in range(offset[i], offset[i + 1]):
                total = 0.0
                p = rows.start[v]
                for s in range(count):
                    if p < rows.start[v + 1] and rows.time[p] == times[s]:
                        total += rows.change[p]
                        p += 1
                    usage[v - offset[i], s] = total
                    if active[v]:
                        low[s] = min(low[s], total)
            for s in range(count):
                stop = times[s + 1] if s + 1 < count else num_times
                tight[s] = _least(room, blocks, times[s], stop)
            left = 0
            for v in range(offset[i], offset[i + 1]):
                if not active[v]:
                    continue
                for s in range(count):
                    if usage[v - offset[i], s] - low[s] > tight[s] + margin:
                        active[v] = False
                        cleared += 1
                        break
                left += active[v]
            if left == 0:
                return -1
        if cleared == before:
            return cleared


@njit(cache=True)
def largest_usage(offset: np.ndarray, rows: Rows) -> np.ndarray:
    """Return the sum over nodes of the largest usage [times] of any of their strategies."""
    num_times = len(rows.slack)
    changes = np.zeros(num_times + 1)
    times = np.empty(num_times + 1, np.int64)
    for i in range(len(offset) - 1):
        begin, end = rows.start[offset[i]], rows.start[offset[i + 1]]
        if begin == end:
            continue
        count = _change_times(rows, begin, end, times)
        top = np.zeros(count)
        for v in range(offset[i], offset[i + 1]):
            total = 0.0
            p = rows.start[v]
            for s in range(count):
                if p < rows.start[v + 1] and rows.time[p] == times[s]:
                    total += rows.change[p]
                    p += 1
                top[s] = max(top[s], total)
        before = 0.0
        for s in range(count):
            changes[times[s]] += top[s] - before
            before = top[s]
    return np.cumsum(changes)[:num_times]


def drop_times(graph: TableGraph) -> TableGraph:
    """Return `graph` with only the undominated memory rows that some choice can exceed."""
    rows = graph.rows
    num_times = len(rows.slack)
    if not num_times:
        return graph
    slack = rows.slack
    margin = 1e-9 * max(float(np.abs(slack).max()), 1e-300)
    binding = np.flatnonzero(largest_usage(graph.tables.offset, rows) > slack - margin)
    owner = np.repeat(np.arange(graph.num_strategies), np.diff(rows.start))
    thin = make_rows(
        graph.num_strategies,
        owner,
        np.searchsorted(binding, rows.time),
        rows.change,
        slack[binding],
    )
    slack = thin.slack
    count = len(slack)
    falls = np.zeros(count + 1, bool)
    rises = np.zeros(count + 1, bool)
    falls[thin.time[thin.change < 0]] = True
    rises[thin.time[thin.change > 0]] = True
    keep = np.ones(count, bool)
    for t in range(count - 2, -1, -1):
        if keep[t + 1] and not falls[t + 1] and slack[t + 1] <= slack[t]:
            keep[t] = False
    for t in range(1, count):
        if keep[t] and keep[t - 1] and not rises[t] and slack[t - 1] <= slack[t]:
            keep[t] = False
    kept = np.flatnonzero(keep)
    owner = np.repeat(np.arange(graph.num_strategies), np.diff(thin.start))
    final = make_rows(
        graph.num_strategies, owner, np.searchsorted(kept, thin.time), thin.change, slack[kept]
    )
    return evolve(graph, rows=final, base_time=graph.base_time[binding[kept]])


def simplified(graph: TableGraph, active: np.ndarray | None = None) -> TableGraph | None:
    """Return `graph` reduced to `active` [strategies] that some choice within the limit can use.

    No such choice is lost. None if some node has no strategy left.
    """
    active = np.ones(graph.num_strategies, bool) if active is None else active
    while True:
        if not drop_unsupported(graph.tables, active):
            return None
        margin = 1e-9 * float(np.abs(graph.rows.slack).max(initial=0.0))
        oversized = drop_oversized(graph.tables.offset, graph.rows, active, margin)
        if oversized < 0:
            return None
        if not oversized:
            return drop_times(graph if active.all() else graph.restricted(active))


def without_dominated(graph: TableGraph | None, until: float = math.inf) -> TableGraph | None:
    """Return the simplified `graph` without strategies that another one replaces at no cost.

    Passes go on until one finds nothing, or `time.perf_counter()` passes `until`. None as in
    `simplified`.
    """
    seconds = until - time.perf_counter()
    work = min(_WORK_PER_SECOND * max(seconds, 0.0), _WORK)
    while graph is not None and work > 0:
        active = np.ones(graph.num_strategies, bool)
        if not remove_dominated(graph.tables, graph.rows, active, work):
            break
        graph = simplified(graph, active)
        if time.perf_counter() > until:
            break
        work *= 0.5
    return graph
