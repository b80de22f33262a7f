"""Message passing bounds (TRW-S: Kolmogorov 2006) on a graph of tables, compiled.

Messages m_e->i(k) reparametrise the cost: b_i(k) = theta_i(k) + sum of messages to i, and the edge
keeps theta_e - m_e->a - m_e->b. A forward sweep visits nodes in order and sends to later ones, a
backward sweep the other way round. Going back, node i with n edges to earlier nodes gives each of
them the share g b_i, g = 1 / max(edges to earlier, edges to later):

    m_e->j(l) = min_k [ theta_e(l, k) + g b_i(k) - m_e->i(k) ] - d_e,     d_e making its minimum 0

What is dropped on the way is never negative, so

    sum_i (1 - g n) min b_i + sum_e d_e  <=  minimum  -> sweep()

and the dropped parts, minimised for each strategy, are its reduced cost: every choice that uses the
strategy costs at least the bound plus it                               -> sweep(..., reduced)
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
def sweep(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    belief: np.ndarray,
    x: np.ndarray,
    reduced: np.ndarray,
    forward: bool,
) -> float:
    """Update the messages to later nodes, or to earlier ones; return a lower bound of the minimum.

    The minimiser of every belief goes to `x` [nodes]. A backward sweep writes reduced costs that
    add to its bound into `reduced` [strategies]; leave it empty for none.
    """
    offset = tables.offset
    bound = 0.0
    weight = np.empty(len(belief))
    spare = np.empty(len(belief) if len(reduced) else 0)
    last = len(offset) - 2
    for step in range(last + 1):
        i = step if forward else last - step
        size = offset[i + 1] - offset[i]
        later = beliefs(tables, cost, to_first, to_second, i, belief)
        begin, end = tables.incident_offset[i], tables.incident_offset[i + 1]
        earlier = end - begin - later
        share = 1.0 / max(later, earlier, 1)
        kept = 1.0 - share * (later if forward else earlier)
        least = belief[0]
        x[i] = 0
        for k in range(1, size):
            if belief[k] < least:
                least = belief[k]
                x[i] = k
        bound += kept * least
        if len(reduced):
            for k in range(size):
                reduced[offset[i] + k] = max(kept, 0.0) * (belief[k] - least)
        for z in range(begin, end):
            e = tables.incident[z]
            if (tables.first[e] == i) != forward:
                continue
            p, a, b = tables.entry_offset[e], tables.to_first[e], tables.to_second[e]
            if forward:
                for k in range(size):
                    weight[k] = share * belief[k] - to_first[a + k]
                out = to_second[b : tables.to_second[e + 1]]
                bound += _send_down(tables.entry, p, weight, size, out)
                continue
            for k in range(size):
                weight[k] = share * belief[k] - to_second[b + k]
            out = to_first[a : tables.to_first[e + 1]]
            least = _send_across(tables.entry, p, weight, size, out)
            bound += least
            if len(reduced):  # what the message leaves of the edge
                for k in range(size):
                    spare[k] = np.inf
                for q in range(len(out)):
                    line = tables.entry[p : p + size]
                    more = out[q]
                    for k in range(size):
                        spare[k] = min(spare[k], line[k] - more)
                    p += size
                for k in range(size):
                    reduced[offset[i] + k] += max(spare[k] + weight[k] - least, 0.0)
    return bound


@njit(cache=True, fastmath=_FAST, inline="always")
def _send_down(entry: np.ndarray, p: int, weight: np.ndarray, size: int, out: np.ndarray) -> float:
    """Write min_k [ table(k, l) + weight(k) ] less its least into `out` [l]; return that.

    The table has `size` rows and begins at `p` of `entry`. Rows are taken as slices, whose indices
    cannot be negative: without that check the inner loop is vectorised.
    """
    width = len(out)
    for q in range(width):
        out[q] = np.inf
    for k in range(size):
        line = entry[p : p + width]
        more = weight[k]
        for q in range(width):
            out[q] = min(out[q], line[q] + more)
        p += width
    least: float = out[0]
    for q in range(1, width):
        least = min(least, out[q])
    for q in range(width):
        out[q] -= least
    return least


@njit(cache=True, fastmath=_FAST, inline="always")
def _send_across(
    entry: np.ndarray, p: int, weight: np.ndarray, size: int, out: np.ndarray
) -> float:
    """Write min_k [ table(l, k) + weight(k) ] less its least into `out` [l]; return that.

    The table has rows of `size` and begins at `p` of `entry`.
    """
    bottom = np.inf
    for q in range(len(out)):
        least = np.inf
        line = entry[p : p + size]
        for k in range(size):
            least = min(least, line[k] + weight[k])
        out[q] = least
        bottom = min(bottom, least)
        p += size
    for q in range(len(out)):
        out[q] -= bottom
    return bottom


@njit(cache=True, inline="always")
def beliefs(
    tables: Tables,
    cost: np.ndarray,
    to_first: np.ndarray,
    to_second: np.ndarray,
    i: int,
    out: np.ndarray,
) -> int:
    """Write the cost of every strategy of node i plus the messages to it into `out`; return the
    number of its edges to later nodes."""
    offset = tables.offset
    size = offset[i + 1] - offset[i]
    later = 0
    for k in range(size):
        out[k] = cost[offset[i] + k]
    for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
        e = tables.incident[z]
        if tables.first[e] == i:
            later += 1
            m = tables.to_first[e]
            for k in range(size):
                out[k] += to_first[m + k]
        else:
            m = tables.to_second[e]
            for k in range(size):
                out[k] += to_second[m + k]
    return later


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
