"""Large-neighbourhood moves: exact minimisation over a ball of nodes, the rest kept, compiled.

Around a centre the `size` nearest nodes may move. They are eliminated in an order that takes the
smallest table first; where the smallest table would exceed `table_limit` entries, the neighbour
with the most open neighbours is kept at its present strategy instead (conditioning), so that the
rest stays narrow -> _plan(). Elimination itself works on one pool of numbers in which every table
towards an eliminated node is contiguous in that node's strategies -> _eliminate().
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ilp_sharding.choice.forest_moves import descend, repair, take_usage
from ilp_sharding.problem.flat_graph import Rows, Tables

MAX_SCOPE = 24
_FAST = {"nnan", "nsz", "contract", "arcp"}


@njit(cache=True)
def seed_random(seed: int) -> None:
    """Seed the generator that compiled loops of this process use."""
    np.random.seed(seed)


@njit(cache=True)
def _ball(tables: Tables, centre: int, size: int, place: np.ndarray, members: np.ndarray) -> int:
    """Fill `members` with up to `size` nodes by distance from `centre`; `place` gets their
    positions.
    """
    members[0] = centre
    place[centre] = 0
    count, head = 1, 0
    while head < count and count < size:
        i = members[head]
        head += 1
        start, stop = tables.incident_offset[i], tables.incident_offset[i + 1]
        degree = stop - start
        shift = np.random.randint(degree) if degree else 0
        for z in range(min(degree, 48)):
            e = tables.incident[start + (z + shift) % degree]
            j = tables.second[e] if tables.first[e] == i else tables.first[e]
            if place[j] < 0:
                place[j] = count
                members[count] = j
                count += 1
                if count == size:
                    break
    return count


@njit(cache=True)
def _plan(
    tables: Tables,
    members: np.ndarray,
    count: int,
    place: np.ndarray,
    log_limit: float,
    noise: float,
    order: np.ndarray,
    scope_size: np.ndarray,
    scope: np.ndarray,
    rank: np.ndarray,
) -> int:
    """Fill the elimination `order` (member positions), scopes and `rank`; return the number
    eliminated.

    `rank` [members] is the place in the order, -1 for members kept at their strategy.
    """
    offset = tables.offset
    linked = np.zeros((count, count), np.bool_)
    weight = np.empty(count)
    load = np.empty(count)
    degree = np.zeros(count, np.int64)
    for p in range(count):
        i = members[p]
        weight[p] = np.log(offset[i + 1] - offset[i])
        load[p] = weight[p] + noise * np.random.random()
    for p in range(count):
        i = members[p]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            j = tables.second[e] if tables.first[e] == i else tables.first[e]
            q = place[j]
            if q >= 0 and not linked[p, q]:
                linked[p, q] = True
                degree[p] += 1
                load[p] += weight[q]
    waiting = np.arange(count)
    num_waiting = count
    done = 0
    near = np.empty(count, np.int64)
    while num_waiting > 0:
        best = 0
        for w in range(1, num_waiting):
            if load[waiting[w]] < load[waiting[best]]:
                best = w
        p = waiting[best]
        num_near = 0
        for w in range(num_waiting):
            q = waiting[w]
            if linked[p, q]:
                near[num_near] = q
                num_near += 1
        if load[p] <= log_limit and num_near <= MAX_SCOPE:
            waiting[best] = waiting[num_waiting - 1]
            num_waiting -= 1
            rank[p] = done
            order[done] = p
            scope_size[done] = num_near
            for a in range(num_near):
                scope[done, a] = near[a]
            done += 1
            for a in range(num_near):
                q = near[a]
                linked[q, p] = False
                degree[q] -= 1
                load[q] -= weight[p]
            for a in range(num_near):
                for b in range(a):
                    q, r = near[a], near[b]
                    if not linked[q, r]:
                        linked[q, r] = True
                        linked[r, q] = True
                        degree[q] += 1
                        degree[r] += 1
                        load[q] += weight[r]
                        load[r] += weight[q]
        else:
            keep = p
            score = degree[p] * (0.2 + np.random.random())
            for a in range(num_near):
                value = degree[near[a]] * (0.2 + np.random.random())
                if value > score:
                    score = value
                    keep = near[a]
            for w in range(num_waiting):
                if waiting[w] == keep:
                    waiting[w] = waiting[num_waiting - 1]
                    num_waiting -= 1
                    break
            rank[keep] = -1
            for w in range(num_waiting):
                q = waiting[w]
                if linked[keep, q]:
                    linked[keep, q] = False
                    linked[q, keep] = False
                    degree[q] -= 1
                    load[q] -= weight[keep]
    # scopes may mention members that were kept later: drop those, latest eliminated first
    for t in range(done):
        m = 0
        for a in range(scope_size[t]):
            if rank[scope[t, a]] >= 0:
                scope[t, m] = scope[t, a]
                m += 1
        scope_size[t] = m
        for a in range(1, m):
            q = scope[t, a]
            b = a
            while b > 0 and rank[scope[t, b - 1]] < rank[q]:
                scope[t, b] = scope[t, b - 1]
                b -= 1
            scope[t, b] = q
    return done


@njit(cache=True, fastmath=_FAST)
def _eliminate(
    tables: Tables,
    cost: np.ndarray,
    members: np.ndarray,
    place: np.ndarray,
    done: int,
    order: np.ndarray,
    scope_size: np.ndarray,
    scope: np.ndarray,
    rank: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
) -> bool:
    """Write into `y` the choice that minimises over the eliminated members; False if too large."""
    offset = tables.offset
    # factors of each step: the edge tables to later members, and the messages of earlier steps
    num_factors = np.zeros(done + 1, np.int64)
    message_at = np.empty(done + 1, np.int64)
    total = 0
    for t in range(done):
        i = members[order[t]]
        size = offset[i + 1] - offset[i]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            j = tables.second[e] if tables.first[e] == i else tables.first[e]
            if place[j] >= 0 and rank[place[j]] > t:
                num_factors[t] += 1
                total += size * (offset[j + 1] - offset[j])
        table = 1
        for a in range(scope_size[t]):
            j = members[scope[t, a]]
            table *= offset[j + 1] - offset[j]
        message_at[t] = total
        total += table
        if scope_size[t]:
            num_factors[rank[scope[t, scope_size[t] - 1]]] += 1
    if total > 40_000_000:
        return False
    pool = np.empty(total)
    factor_start = np.zeros(done + 1, np.int64)
    for t in range(done):
        factor_start[t + 1] = factor_start[t] + num_factors[t]
    fill = factor_start[:-1].copy()
    factor_at = np.empty(factor_start[done], np.int64)
    stride = np.zeros((factor_start[done], MAX_SCOPE), np.int64)
    axis = np.full(len(rank), -1)
    own = np.empty(offset[-1] if done else 1)
    index = np.zeros(MAX_SCOPE, np.int64)
    cursor = 0
    longest = 1
    for t in range(done):
        i = members[order[t]]
        longest = max(longest, offset[i + 1] - offset[i])
    line = np.empty(longest)
    for t in range(done):
        i = members[order[t]]
        base, size = offset[i], offset[i + 1] - offset[i]
        width = scope_size[t]
        for a in range(width):
            axis[scope[t, a]] = a
        for k in range(size):
            own[base + k] = cost[base + k]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            forward = tables.first[e] == i
            j = tables.second[e] if forward else tables.first[e]
            other = offset[j + 1] - offset[j]
            p = tables.entry_offset[e]
            q = place[j]
            if q >= 0 and rank[q] > t:
                f = fill[t]
                fill[t] += 1
                factor_at[f] = cursor
                stride[f, axis[q]] = size
                if forward:
                    for c in range(other):
                        for k in range(size):
                            pool[cursor + c * size + k] = tables.entry[p + k * other + c]
                else:
                    for c in range(other * size):
                        pool[cursor + c] = tables.entry[p + c]
                cursor += size * other
            elif q < 0 or rank[q] < 0:
                if forward:
                    for k in range(size):
                        own[base + k] += tables.entry[p + k * other + x[j]]
                else:
                    for k in range(size):
                        own[base + k] += tables.entry[p + x[j] * size + k]
        # strides of the messages that arrived here, laid out by their own scopes
        for f in range(factor_start[t], fill[t]):
            if factor_at[f] < 0:
                source = -factor_at[f] - 1
                factor_at[f] = message_at[source]
                step = 1
                for a in range(scope_size[source] - 1, -1, -1):
                    member = scope[source, a]
                    if member != order[t]:
                        stride[f, axis[member]] = step
                    j = members[member]
                    step *= offset[j + 1] - offset[j]
        table = 1
        for a in range(width):
            j = members[scope[t, a]]
            table *= offset[j + 1] - offset[j]
            index[a] = 0
        start, stop = factor_start[t], factor_start[t + 1]
        at = factor_at[start:stop].copy()
        out = message_at[t]
        for c in range(table):
            for k in range(size):
                line[k] = own[base + k]
            for f in range(stop - start):
                part = pool[at[f] : at[f] + size]
                for k in range(size):
                    line[k] += part[k]
            least = line[0]
            for k in range(1, size):
                least = min(least, line[k])
            pool[out + c] = least
            a = width - 1
            while a >= 0:
                j = members[scope[t, a]]
                index[a] += 1
                if index[a] < offset[j + 1] - offset[j]:
                    for f in range(stop - start):
                        at[f] += stride[start + f, a]
                    break
                back = index[a] - 1
                index[a] = 0
                for f in range(stop - start):
                    at[f] -= back * stride[start + f, a]
                a -= 1
        cursor = out + table
        for a in range(width):
            axis[scope[t, a]] = -1
        if width:
            receiver = rank[scope[t, width - 1]]
            f = fill[receiver]
            fill[receiver] += 1
            factor_at[f] = -t - 1
    for t in range(done - 1, -1, -1):
        i = members[order[t]]
        base, size = offset[i], offset[i + 1] - offset[i]
        for k in range(size):
            line[k] = own[base + k]
        for f in range(factor_start[t], factor_start[t + 1]):
            p = factor_at[f]
            for a in range(scope_size[t]):
                p += stride[f, a] * y[members[scope[t, a]]]
            for k in range(size):
                line[k] += pool[p + k]
        best = x[i]
        least = line[best]
        if least < np.inf:
            least -= 1e-12 * abs(least)
        for k in range(size):
            if line[k] < least:
                least = line[k]
                best = k
        y[i] = best
    return True


@njit(cache=True)
def minimise_ball(
    tables: Tables,
    cost: np.ndarray,
    centre: int,
    size: int,
    table_limit: float,
    noise: float,
    x: np.ndarray,
) -> int:
    """Improve `x` over a ball around `centre` under node costs `cost`; return the changes."""
    num_nodes = len(tables.offset) - 1
    size = min(size, num_nodes)
    place = np.full(num_nodes, -1)
    members = np.empty(size, np.int64)
    count = _ball(tables, centre, size, place, members)
    order = np.empty(count, np.int64)
    scope_size = np.empty(count, np.int64)
    scope = np.empty((count, MAX_SCOPE), np.int64)
    rank = np.full(count, -1)
    done = _plan(
        tables, members, count, place, np.log(table_limit), noise, order, scope_size, scope, rank
    )
    y = x.copy()
    if not _eliminate(tables, cost, members, place, done, order, scope_size, scope, rank, x, y):
        return 0
    changes = 0
    for i in range(num_nodes):
        if y[i] != x[i]:
            x[i] = y[i]
            changes += 1
    return changes


@njit(cache=True)
def local_cost(tables: Tables, x: np.ndarray, y: np.ndarray) -> float:
    """Return cost(y) - cost(x), touching only nodes that differ."""
    offset = tables.offset
    total = 0.0
    for i in range(len(x)):
        if x[i] == y[i]:
            continue
        total += tables.cost[offset[i] + y[i]] - tables.cost[offset[i] + x[i]]
        for z in range(tables.incident_offset[i], tables.incident_offset[i + 1]):
            e = tables.incident[z]
            a, b = tables.first[e], tables.second[e]
            other = b if a == i else a
            if other < i and x[other] != y[other]:
                continue
            p = tables.entry_offset[e]
            width = offset[b + 1] - offset[b]
            total += tables.entry[p + y[a] * width + y[b]] - tables.entry[p + x[a] * width + x[b]]
    return total


@njit(cache=True)
def search_neighbourhoods(
    tables: Tables,
    rows: Rows,
    prices: np.ndarray,
    x: np.ndarray,
    left: np.ndarray,
    sizes: np.ndarray,
    scores: np.ndarray,
    table_limit: float,
    num_moves: int,
) -> float:
    """Improve `x` in place by ball moves that keep all rows; return the cost gained.

    Each move minimises cost plus a random multiple of the memory `prices`; a move whose result
    exceeds a row is repaired or dropped. `scores` [sizes] learn which ball sizes gain.
    """
    num_nodes = len(tables.offset) - 1
    gained = 0.0
    for _ in range(num_moves):
        total = 0.0
        for s in range(len(sizes)):
            total += scores[s]
        pick = np.random.random() * total
        s = 0
        while s + 1 < len(sizes) and pick > scores[s]:
            pick -= scores[s]
            s += 1
        draw = np.random.random()
        factor = 1.0
        if draw < 0.2:
            factor = 0.0
        elif draw < 0.6:
            factor = 2.0 ** (3.0 * np.random.random() - 1.5)
        y = x.copy()
        cost = tables.cost + factor * prices if len(left) else tables.cost
        centre = np.random.randint(num_nodes)
        move_gain = 0.0
        noise = 2.0 * np.random.random()
        if minimise_ball(tables, cost, centre, sizes[s], table_limit, noise, y) > 0:
            trial = left.copy()
            fits = True
            for i in range(num_nodes):
                if y[i] != x[i]:
                    take_usage(rows, tables.offset[i] + x[i], -1.0, trial)
                    take_usage(rows, tables.offset[i] + y[i], 1.0, trial)
            if len(trial) and np.min(trial) < 0.0:
                fits = repair(tables, rows, cost, y, trial, 20)
                if fits:
                    changed = np.flatnonzero(x != y)
                    descend(tables, rows, changed, y, trial, 2)
            if fits:
                change = local_cost(tables, x, y)
                if change <= 0.0:
                    move_gain = -change
                    for i in range(num_nodes):
                        x[i] = y[i]
                    for t in range(len(left)):
                        left[t] = trial[t]
        gained += move_gain
        scores[s] = max(0.95 * scores[s] + (0.05 if move_gain > 0.0 else 0.0), 0.02)
    return gained
