"""The elimination of `elimination`, order and all, compiled: for what message bounds leave.

Such a rest has some hundred nodes of a few strategies each, of which planning an order in Python
takes longer than all sums. The order is the same greedy one, the sums are those of
`elimination_loops`.                                                               -> eliminate()

In plain loops: `np.diff`, `np.sort` and assigned slices take numba longer to compile than the rest.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ilp_sharding.exact.elimination_loops import Steps, minimise, walk_back
from ilp_sharding.problem.flat_graph import Tables


@njit(cache=True)
def eliminate(tables: Tables, limit: float, x: np.ndarray) -> float:
    """Write the best choice into `x` [nodes] and return its cost, NaN if that takes tables of more
    than `limit` entries."""
    order, start, scopes = _order(tables, limit)
    if not len(order):
        return np.nan if len(x) else 0.0
    steps, values = _steps(tables, order, start, scopes)
    total = minimise(steps, values, 0, len(order))
    chosen = np.zeros(len(order), np.int64)
    walk_back(steps, values, chosen)
    for t in range(len(order)):
        x[order[t]] = chosen[t]
    return total


@njit(cache=True)
def _order(tables: Tables, limit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (order [nodes], scopes: those of step t are `scopes[start[t]:start[t + 1]]`), the node
    with the smallest table first; no order if all tables have more than `limit` entries."""
    n = len(tables.offset) - 1
    near = np.zeros((n, n), np.bool_)
    weight, load = np.empty(n), np.empty(n)
    for i in range(n):
        weight[i] = np.log(tables.offset[i + 1] - tables.offset[i])
        load[i] = weight[i]
    for e in range(len(tables.first)):
        i, j = tables.first[e], tables.second[e]
        near[i, j] = near[j, i] = True
        load[i] += weight[j]
        load[j] += weight[i]
    order, start = np.empty(n, np.int64), np.zeros(n + 1, np.int64)
    scopes = np.empty(8 * n, np.int64)
    waiting = np.ones(n, np.bool_)
    work = 0.0
    for t in range(n):
        node = -1
        for i in range(n):
            if waiting[i] and (node < 0 or load[i] < load[node]):
                node = i
        work += np.exp(min(load[node], 600.0))
        if work > limit:
            return order[:0], start, scopes
        order[t] = node
        waiting[node] = False
        begin = end = start[t]
        if begin + n > len(scopes):
            longer = np.empty(2 * len(scopes), np.int64)
            for p in range(begin):
                longer[p] = scopes[p]
            scopes = longer
        for j in range(n):
            if waiting[j] and near[node, j]:
                scopes[end] = j
                end += 1
        start[t + 1] = end
        for p in range(begin, end):
            a = scopes[p]
            load[a] -= weight[node]
            for q in range(p + 1, end):
                b = scopes[q]
                if not near[a, b]:
                    near[a, b] = near[b, a] = True
                    load[a] += weight[b]
                    load[b] += weight[a]
    return order, start, scopes


@njit(cache=True)
def _steps(
    tables: Tables, order: np.ndarray, start: np.ndarray, scopes: np.ndarray
) -> tuple[Steps, np.ndarray]:
    """Return the steps of an order and the array of their numbers, as `elimination_loops.steps_of`
    does."""
    n = len(order)
    step, size, axes = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    cost, message = np.empty(n, np.int64), np.empty(n, np.int64)
    most, put = 0, 0
    for t in range(n):
        i = order[t]
        step[i] = t  # that eliminates a node
        axes[t] = start[t + 1] - start[t]
        most = max(most, axes[t])
        cost[t], size[t] = put, tables.offset[i + 1] - tables.offset[i]
        put += size[t]
    axis_step = np.zeros((n, most), np.int64)
    axis_size = np.ones((n, most), np.int64)
    term = np.zeros(n + 1, np.int64)  # the number of terms, then where they begin
    child, sibling = np.full(n, -1), np.full(n, -1)
    for t in range(n):
        message[t] = put
        length = 1
        for axis in range(axes[t]):  # sorted, the last step first
            other, place = step[scopes[start[t] + axis]], axis
            while place and axis_step[t, place - 1] < other:
                axis_step[t, place] = axis_step[t, place - 1]
                place -= 1
            axis_step[t, place] = other
            length *= size[other]
        for axis in range(axes[t]):
            axis_size[t, axis] = size[axis_step[t, axis]]
        put += length
    for t in range(n - 1, -1, -1):
        if axes[t]:
            parent = axis_step[t, axes[t] - 1]
            sibling[t] = child[parent]
            child[parent] = t
            term[parent + 1] += 1
    for e in range(len(tables.first)):
        term[min(step[tables.first[e]], step[tables.second[e]]) + 1] += 1
    for t in range(n):
        term[t + 1] += term[t]
    steps = Steps(
        size,
        axes,
        cost,
        message,
        axis_size,
        axis_step,
        term,
        np.empty(n, np.int64),
        np.empty(term[n], np.int64),
        np.zeros((term[n], most), np.int64),
    )
    values = np.empty(put + len(tables.entry))
    for t in range(n):
        i = order[t]
        for k in range(size[t]):
            values[cost[t] + k] = tables.cost[tables.offset[i] + k]
        place = term[t]
        for varies in (False, True):
            if varies:
                steps.varying[t] = place
            for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
                e = tables.incident[z]
                other = step[tables.second[e] if tables.first[e] == i else tables.first[e]]
                if other > t and (other == axis_step[t, axes[t] - 1]) == varies:
                    steps.start[place] = put
                    steps.stride[place, _axis(axis_step[t], other)] = size[t]
                    put = _table(tables, e, i, values, put)
                    place += 1
            c = child[t]
            while c >= 0:
                inside = False  # whether the last axis of the scope is one of the message
                for axis in range(axes[c] - 1):
                    inside |= axis_step[c, axis] == axis_step[t, axes[t] - 1]
                if inside == varies:
                    steps.start[place] = message[c]
                    width = size[t]
                    for axis in range(axes[c] - 2, -1, -1):
                        steps.stride[place, _axis(axis_step[t], axis_step[c, axis])] = width
                        width *= axis_size[c, axis]
                    place += 1
                c = sibling[c]
    return steps, values


@njit(cache=True)
def _axis(steps: np.ndarray, step: int) -> int:
    axis = 0
    while steps[axis] != step:
        axis += 1
    return axis


@njit(cache=True)
def _table(tables: Tables, e: int, own: int, values: np.ndarray, put: int) -> int:
    """Write the table of edge e from `put` on as [other node, `own`]; return where it ends."""
    i, j = tables.first[e], tables.second[e]
    p, width = tables.entry_offset[e], tables.offset[j + 1] - tables.offset[j]
    if own == j:
        for k in range(p, tables.entry_offset[e + 1]):
            values[put] = tables.entry[k]
            put += 1
        return put
    for q in range(width):
        for k in range(tables.offset[i + 1] - tables.offset[i]):
            values[put] = tables.entry[p + k * width + q]
            put += 1
    return put
