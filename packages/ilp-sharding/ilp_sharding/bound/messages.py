"""Message passing bounds (TRW-S: Kolmogorov 2006) on a graph of tables, compiled.

Messages m_e->i(k) reparametrise the cost: b_i(k) = theta_i(k) + sum of messages to i, and the edge
keeps theta_e - m_e->a - m_e->b. A backward sweep visits nodes in reverse order. Node i with n edges
to earlier nodes gives each of them the share g b_i, g = 1 / max(edges to earlier, edges to later):

    m_e->j(l) = min_k [ theta_e(l, k) + g b_i(k) - m_e->i(k) ] - d_e,     d_e making its minimum 0

What is dropped on the way is never negative, so

    sum_i (1 - g n) min b_i + sum_e d_e  <=  minimum  -> forward_sweep(), backward_sweep()

and the dropped parts, minimised for each strategy, are its reduced cost: every choice that uses the
strategy costs at least the bound plus it                                     -> reduced_costs()
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ilp_sharding.problem.flat_graph import Rows, Tables

_FAST = {"nnan", "nsz", "contract", "arcp"}


@njit(cache=True, fastmath=_FAST)
def memory_prices(rows: Rows, multipliers: np.ndarray, out: np.ndarray) -> None:
    """Write per strategy the price of its memory, `multipliers` [times], into `out`."""
    num_times = len(multipliers)
    later = np.zeros(num_times + 1)
    for t in range(num_times - 1, -1, -1):
        later[t] = later[t + 1] + multipliers[t]
    for v in range(len(rows.start) - 1):
        total = 0.0
        for p in range(rows.start[v], rows.start[v + 1]):
            total += rows.change[p] * later[rows.time[p]]
        out[v] = total


@njit(cache=True)
def usage_profile(tables: Tables, rows: Rows, x: np.ndarray, out: np.ndarray) -> None:
    """Write the usage [times] of the choice `x` into `out`."""
    out[:] = 0.0
    for i in range(len(x)):
        v = tables.offset[i] + x[i]
        for p in range(rows.start[v], rows.start[v + 1]):
            out[rows.time[p]] += rows.change[p]
    total = 0.0
    for t in range(len(out)):
        total += out[t]
        out[t] = total


@njit(cache=True)
def choice_cost(tables: Tables, cost: np.ndarray, x: np.ndarray) -> float:
    """Return the cost of `x` under node costs `cost`."""
    total = 0.0
    for i in range(len(x)):
        total += cost[tables.offset[i] + x[i]]
    for e in range(len(tables.first)):
        b = tables.second[e]
        width = tables.offset[b + 1] - tables.offset[b]
        total += tables.entry[tables.entry_offset[e] + x[tables.first[e]] * width + x[b]]
    return total


@njit(cache=True, fastmath=_FAST)
def forward_sweep(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    belief: np.ndarray,
    x: np.ndarray,
) -> float:
    """Update the messages to later nodes; return a lower bound of the minimum."""
    offset = tables.offset
    bound = 0.0
    for i in range(len(offset) - 1):
        size = offset[i + 1] - offset[i]
        later = 0
        degree = tables.incident_offset[i + 1] - tables.incident_offset[i]
        for k in range(size):
            belief[k] = cost[offset[i] + k]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.first[e] == i:
                later += 1
                m = tables.to_first[e]
                for k in range(size):
                    belief[k] += to_first[m + k]
            else:
                m = tables.to_second[e]
                for k in range(size):
                    belief[k] += to_second[m + k]
        share = 1.0 / max(later, degree - later, 1)
        least = belief[0]
        x[i] = 0
        for k in range(1, size):
            if belief[k] < least:
                least = belief[k]
                x[i] = k
        bound += (1.0 - share * later) * least
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.first[e] != i:
                continue
            j = tables.second[e]
            width = offset[j + 1] - offset[j]
            out = to_second[tables.to_second[e] : tables.to_second[e] + width]
            for q in range(width):
                out[q] = np.inf
            m = tables.to_first[e]
            p = tables.entry_offset[e]
            for k in range(size):
                weight = share * belief[k] - to_first[m + k]
                line = tables.entry[p : p + width]
                for q in range(width):
                    out[q] = min(out[q], line[q] + weight)
                p += width
            least = out[0]
            for q in range(1, width):
                least = min(least, out[q])
            for q in range(width):
                out[q] -= least
            bound += least
    return bound


@njit(cache=True, fastmath=_FAST)
def backward_sweep(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    belief: np.ndarray,
    x: np.ndarray,
) -> float:
    """Update the messages to earlier nodes; return a lower bound of the minimum."""
    offset = tables.offset
    bound = 0.0
    weight = np.empty(len(belief))
    for i in range(len(offset) - 2, -1, -1):
        size = offset[i + 1] - offset[i]
        earlier = 0
        degree = tables.incident_offset[i + 1] - tables.incident_offset[i]
        for k in range(size):
            belief[k] = cost[offset[i] + k]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.first[e] == i:
                m = tables.to_first[e]
                for k in range(size):
                    belief[k] += to_first[m + k]
            else:
                earlier += 1
                m = tables.to_second[e]
                for k in range(size):
                    belief[k] += to_second[m + k]
        share = 1.0 / max(earlier, degree - earlier, 1)
        least = belief[0]
        x[i] = 0
        for k in range(1, size):
            if belief[k] < least:
                least = belief[k]
                x[i] = k
        bound += (1.0 - share * earlier) * least
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.second[e] != i:
                continue
            j = tables.first[e]
            width = offset[j + 1] - offset[j]
            m = tables.to_second[e]
            for k in range(size):
                weight[k] = share * belief[k] - to_second[m + k]
            out = to_first[tables.to_first[e] : tables.to_first[e] + width]
            p = tables.entry_offset[e]
            bottom = np.inf
            for q in range(width):
                least = np.inf
                line = tables.entry[p : p + size]
                for k in range(size):
                    least = min(least, line[k] + weight[k])
                out[q] = least
                bottom = min(bottom, least)
                p += size
            for q in range(width):
                out[q] -= bottom
            bound += bottom
    return bound


@njit(cache=True, fastmath=_FAST)
def reduced_costs(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    belief: np.ndarray,
    reduced: np.ndarray,
) -> float:
    """Do a backward sweep; write the reduced cost [strategies] and return the bound it adds to."""
    offset = tables.offset
    bound = 0.0
    weight = np.empty(len(belief))
    for i in range(len(offset) - 2, -1, -1):
        size = offset[i + 1] - offset[i]
        earlier = 0
        degree = tables.incident_offset[i + 1] - tables.incident_offset[i]
        for k in range(size):
            belief[k] = cost[offset[i] + k]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.first[e] == i:
                m = tables.to_first[e]
                for k in range(size):
                    belief[k] += to_first[m + k]
            else:
                earlier += 1
                m = tables.to_second[e]
                for k in range(size):
                    belief[k] += to_second[m + k]
        share = 1.0 / max(earlier, degree - earlier, 1)
        rest = max(1.0 - share * earlier, 0.0)
        least = belief[0]
        for k in range(1, size):
            least = min(least, belief[k])
        bound += (1.0 - share * earlier) * least
        for k in range(size):
            reduced[offset[i] + k] = rest * (belief[k] - least)
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.second[e] != i:
                continue
            j = tables.first[e]
            width = offset[j + 1] - offset[j]
            m = tables.to_second[e]
            for k in range(size):
                weight[k] = share * belief[k] - to_second[m + k]
            out = to_first[tables.to_first[e] : tables.to_first[e] + width]
            p = tables.entry_offset[e]
            bottom = np.inf
            for q in range(width):
                least = np.inf
                for k in range(size):
                    least = min(least, tables.entry[p + q * size + k] + weight[k])
                out[q] = least
                bottom = min(bottom, least)
            for q in range(width):
                out[q] -= bottom
            bound += bottom
            for k in range(size):
                least = np.inf
                for q in range(width):
                    least = min(least, tables.entry[p + q * size + k] - out[q])
                reduced[offset[i] + k] += max(least + weight[k] - bottom, 0.0)
    return bound


@njit(cache=True)
def beliefs(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    i: int,
    out: np.ndarray,
) -> None:
    """Write the cost of every strategy of node i plus the messages to it into `out`."""
    offset = tables.offset
    size = offset[i + 1] - offset[i]
    for k in range(size):
        out[k] = cost[offset[i] + k]
    for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
        e = tables.incident[z]
        if tables.first[e] == i:
            m = tables.to_first[e]
            for k in range(size):
                out[k] += to_first[m + k]
        else:
            m = tables.to_second[e]
            for k in range(size):
                out[k] += to_second[m + k]


@njit(cache=True)
def clearest(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    belief: np.ndarray,
    waiting: np.ndarray,
) -> tuple[int, int]:
    """Return the node where `waiting` [nodes] whose best strategy is furthest from its second best,
    and that strategy; (-1, 0) if none waits.
    """
    found, choice, widest = -1, 0, -np.inf
    for i in range(len(waiting)):
        if not waiting[i]:
            continue
        size = tables.offset[i + 1] - tables.offset[i]
        beliefs(tables, cost, to_first, to_second, i, belief)
        best = int(np.argmin(belief[:size]))
        least = belief[best]
        belief[best] = np.inf
        margin = np.min(belief[:size]) - least
        if found < 0 or margin > widest:
            found, choice, widest = i, best, margin
    return found, choice


@njit(cache=True)
def decode(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    belief: np.ndarray,
    x: np.ndarray,
) -> None:
    """Write into `x` a choice made in node order: tables towards earlier nodes, messages from
    later.
    """
    offset = tables.offset
    for i in range(len(offset) - 1):
        size = offset[i + 1] - offset[i]
        for k in range(size):
            belief[k] = cost[offset[i] + k]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.first[e] == i:
                m = tables.to_first[e]
                for k in range(size):
                    belief[k] += to_first[m + k]
            else:
                p = tables.entry_offset[e] + x[tables.first[e]] * size
                for k in range(size):
                    belief[k] += tables.entry[p + k]
        best = 0
        for k in range(1, size):
            if belief[k] < belief[best]:
                best = k
        x[i] = best
