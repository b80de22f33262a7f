"""Compiled moves on a choice: forests, single nodes, and repair of exceeded memory rows.

- `forest_move` picks an induced forest in a given order of nodes and minimises over it exactly, the
  other nodes kept (memory priced, not limited).
- `descend` takes single-node changes that lower the cost and keep every row.
- `repair` takes, until no row is exceeded, the change at the worst row with the least cost increase
  per unit of excess removed.

`left` [times] is always slack minus usage and is kept up to date.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ilp_sharding.problem.flat_graph import Rows, Tables


@njit(cache=True)
def take_usage(rows: Rows, v: int, sign: float, left: np.ndarray) -> None:
    """Subtract `sign` times the usage of strategy v from `left`."""
    total = 0.0
    for p in range(rows.start[v], rows.start[v + 1]):
        total += rows.change[p] * sign
        stop = rows.time[p + 1] if p + 1 < rows.start[v + 1] else len(left)
        if total != 0.0:
            for t in range(rows.time[p], stop):
                left[t] -= total


@njit(cache=True)
def swap_fits(rows: Rows, old: int, new: int, left: np.ndarray) -> bool:
    """Return whether replacing strategy `old` by `new` exceeds no row that it raises."""
    p, p_stop = rows.start[old], rows.start[old + 1]
    q, q_stop = rows.start[new], rows.start[new + 1]
    last = len(left)
    total = 0.0
    while p < p_stop or q < q_stop:
        now = last
        if p < p_stop:
            now = rows.time[p]
        if q < q_stop and rows.time[q] < now:
            now = rows.time[q]
        if p < p_stop and rows.time[p] == now:
            total -= rows.change[p]
            p += 1
        if q < q_stop and rows.time[q] == now:
            total += rows.change[q]
            q += 1
        stop = last
        if p < p_stop:
            stop = rows.time[p]
        if q < q_stop and rows.time[q] < stop:
            stop = rows.time[q]
        if total > 0.0:
            for t in range(now, stop):
                if left[t] < total:
                    return False
    return True


@njit(cache=True)
def conditional_costs(
    tables: Tables, cost: np.ndarray, x: np.ndarray, i: int, out: np.ndarray
) -> None:
    """Write the cost of every strategy of node i, its neighbours as in `x`, into `out`."""
    offset = tables.offset
    size = offset[i + 1] - offset[i]
    for k in range(size):
        out[k] = cost[offset[i] + k]
    for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
        e = tables.incident[z]
        if tables.first[e] == i:
            j = tables.second[e]
            width = offset[j + 1] - offset[j]
            p = tables.entry_offset[e] + x[j]
            for k in range(size):
                out[k] += tables.entry[p]
                p += width
        else:
            p = tables.entry_offset[e] + x[tables.first[e]] * size
            for k in range(size):
                out[k] += tables.entry[p + k]


@njit(cache=True)
def _widest(tables: Tables) -> int:
    """Return the most strategies that a node has."""
    found = 0
    for i in range(len(tables.offset) - 1):
        found = max(found, tables.offset[i + 1] - tables.offset[i])
    return found


@njit(cache=True)
def descend(
    tables: Tables, rows: Rows, order: np.ndarray, x: np.ndarray, left: np.ndarray, passes: int
) -> float:
    """Lower the cost of `x` by single-node changes that keep all rows; return the gain."""
    scratch = np.empty(_widest(tables))
    gain = 0.0
    for _ in range(passes):
        before = gain
        for i in order:
            base = tables.offset[i]
            conditional_costs(tables, tables.cost, x, i, scratch)
            current = scratch[x[i]]
            while True:
                best = -1
                least = current - 1e-9 * abs(current) if current < np.inf else np.inf
                for k in range(tables.offset[i + 1] - base):
                    if scratch[k] < least:
                        least = scratch[k]
                        best = k
                if best < 0:
                    break
                if swap_fits(rows, base + x[i], base + best, left):
                    take_usage(rows, base + x[i], -1.0, left)
                    take_usage(rows, base + best, 1.0, left)
                    gain += current - least
                    x[i] = best
                    break
                scratch[best] = np.inf
        if gain <= before:
            break
    return gain


@njit(cache=True)
def _usage_at(rows: Rows, v: int, time: int) -> float:
    total = 0.0
    for p in range(rows.start[v], rows.start[v + 1]):
        if rows.time[p] > time:
            break
        total += rows.change[p]
    return total


@njit(cache=True)
def repair(
    tables: Tables,
    rows: Rows,
    guide: np.ndarray,
    x: np.ndarray,
    left: np.ndarray,
    max_steps: int,
) -> bool:
    """Change `x` until no row is exceeded, node costs being `guide`; return success."""
    if len(left) == 0:
        return True
    offset = tables.offset
    num_nodes = len(offset) - 1
    scratch = np.empty(_widest(tables))
    tabu = np.zeros(num_nodes, np.int64)
    for step in range(1, max_steps + 1):
        worst = int(np.argmin(left))
        if left[worst] >= 0.0:
            return True
        excess = -left[worst]
        best_node, best_strategy, best_score = -1, -1, np.inf
        for i in range(num_nodes):
            used = _usage_at(rows, offset[i] + x[i], worst)
            if used <= 0.0 or tabu[i] > step:
                continue
            conditional_costs(tables, guide, x, i, scratch)
            current = scratch[x[i]]
            for k in range(offset[i + 1] - offset[i]):
                if scratch[k] == np.inf:
                    continue
                saved = used - _usage_at(rows, offset[i] + k, worst)
                if saved <= 0.0:
                    continue
                increase = scratch[k] - current
                score = increase / min(saved, excess) if increase > 0.0 else increase
                if score < best_score:
                    best_node, best_strategy, best_score = i, k, score
        if best_node < 0:
            return False
        take_usage(rows, offset[best_node] + x[best_node], -1.0, left)
        take_usage(rows, offset[best_node] + best_strategy, 1.0, left)
        x[best_node] = best_strategy
        tabu[best_node] = step + 10
    return bool(np.min(left) >= 0.0)


@njit(cache=True)
def _root(above: np.ndarray, i: int) -> int:
    while above[i] != i:
        above[i] = above[above[i]]
        i = above[i]
    return i


@njit(cache=True)
def _induced_forest(tables: Tables, order: np.ndarray, inside: np.ndarray) -> None:
    """Mark in `inside` a maximal set of nodes, in `order`, that induces a forest."""
    num_nodes = len(tables.offset) - 1
    above = np.arange(num_nodes)
    roots = np.empty(num_nodes, np.int64)
    for i in order:
        count = 0
        simple = True
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            j = tables.second[e] if tables.first[e] == i else tables.first[e]
            if inside[j]:
                root = _root(above, j)
                for q in range(count):
                    if roots[q] == root:
                        simple = False
                        break
                if not simple:
                    break
                roots[count] = root
                count += 1
        if simple:
            inside[i] = True
            for q in range(count):
                above[roots[q]] = i


@njit(cache=True)
def forest_move(tables: Tables, cost: np.ndarray, order: np.ndarray, x: np.ndarray) -> int:
    """Minimise `x` exactly over an induced forest, node costs `cost`; return the changes."""
    offset = tables.offset
    num_nodes = len(offset) - 1
    inside = np.zeros(num_nodes, np.bool_)
    _induced_forest(tables, order, inside)
    visited = np.zeros(num_nodes, np.bool_)
    queue = np.empty(num_nodes, np.int64)
    edge_up = np.full(num_nodes, -1)
    tail = 0
    for r in order:
        if not inside[r] or visited[r]:
            continue
        visited[r] = True
        queue[tail] = r
        head = tail
        tail += 1
        while head < tail:
            i = queue[head]
            head += 1
            for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
                e = tables.incident[z]
                j = tables.second[e] if tables.first[e] == i else tables.first[e]
                if inside[j] and not visited[j]:
                    visited[j] = True
                    edge_up[j] = e
                    queue[tail] = j
                    tail += 1
    total = np.empty(offset[num_nodes])
    for q in range(tail):
        i = queue[q]
        base, size = offset[i], offset[i + 1] - offset[i]
        for k in range(size):
            total[base + k] = cost[base + k]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            if tables.first[e] == i:
                j = tables.second[e]
                if not inside[j]:
                    width = offset[j + 1] - offset[j]
                    p = tables.entry_offset[e] + x[j]
                    for k in range(size):
                        total[base + k] += tables.entry[p]
                        p += width
            else:
                j = tables.first[e]
                if not inside[j]:
                    p = tables.entry_offset[e] + x[j] * size
                    for k in range(size):
                        total[base + k] += tables.entry[p + k]
    for q in range(tail - 1, -1, -1):
        i = queue[q]
        e = edge_up[i]
        if e < 0:
            continue
        base, size = offset[i], offset[i + 1] - offset[i]
        p = tables.entry_offset[e]
        if tables.first[e] == i:
            j = tables.second[e]
            width = offset[j + 1] - offset[j]
            for c in range(width):
                least = np.inf
                for k in range(size):
                    least = min(least, total[base + k] + tables.entry[p + k * width + c])
                total[offset[j] + c] += least
        else:
            j = tables.first[e]
            for c in range(offset[j + 1] - offset[j]):
                least = np.inf
                for k in range(size):
                    least = min(least, total[base + k] + tables.entry[p + k])
                total[offset[j] + c] += least
                p += size
    changes = 0
    for q in range(tail):
        i = queue[q]
        e = edge_up[i]
        base, size = offset[i], offset[i + 1] - offset[i]
        p, stride = 0, 0
        if e >= 0 and tables.first[e] == i:
            j = tables.second[e]
            stride = offset[j + 1] - offset[j]
            p = tables.entry_offset[e] + x[j]
        elif e >= 0:
            stride = 1
            p = tables.entry_offset[e] + x[tables.first[e]] * size
        best = x[i]
        least = total[base + best] + (tables.entry[p + best * stride] if e >= 0 else 0.0)
        if least < np.inf:
            least -= 1e-9 * abs(least)
        for k in range(size):
            value = total[base + k] + (tables.entry[p + k * stride] if e >= 0 else 0.0)
            if value < least:
                least = value
                best = k
        if best != x[i]:
            x[i] = best
            changes += 1
    return changes
