"""Message sweeps that drop strategies on the way, compiled, for problems without memory rows.

After every sweep forward and back (`messages.sweep`) a choice is decoded, and its cost C is an
upper bound. Every few sweeps the strategies v drop out whose reduced cost r_v shows that no choice
that uses them costs at most C,

    bound + r_v > C,

and with them their rows of tables and messages; nodes with one strategy left go into the costs of
their neighbours -> keep(). Messages stay as they are, so that the bound does not fall. Of a planner
problem of 180,000 table entries some thousands are left after ten sweeps              -> climb()
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from ilp_sharding.bound import messages
from ilp_sharding.problem.flat_graph import TableGraph, Tables, make_rows

OPEN, PROVED, EMPTY = 0, 1, 2  # how a climb ended
_FIRST_STEPS = 4  # of a climb, after every second of which strategies drop out,
_EARLY, _EVERY = 2, 4  # and then after every fourth: reduced costs cost half a sweep
_FEW_GONE = 0.05  # of the strategies: fewer are not worth moving the rest
_QUIET = 3  # steps without gain after which a climb ends
ROUNDING = 1e-11  # of a cost, within which a bound proves it
MARGIN = 1e-12  # of a sum, by which its rounding may be off


class Rest(NamedTuple):
    """What is left of a graph, at the beginning of arrays as long as the whole graph's.

    `size`: nodes left, edges left, whether any pair is forbidden.
    `to_first`, `to_second`: messages. `base_node` [nodes], `label` [strategies], `settled` [base
    nodes] as in `TableGraph`. `reduced` [strategies]: reduced costs, over the bound
    `numbers[REDUCED]`. `numbers`: see the constants below. `choice` [base nodes]: the best known.
    """

    tables: Tables
    to_first: np.ndarray
    to_second: np.ndarray
    base_node: np.ndarray
    label: np.ndarray
    settled: np.ndarray
    reduced: np.ndarray
    size: np.ndarray
    numbers: np.ndarray
    choice: np.ndarray


CONSTANT, BOUND, OBJECTIVE, REDUCED, VISITED = range(5)  # of `Rest.numbers`; entries visited


def rest_of(graph: TableGraph) -> Rest:
    """Return the whole of `graph`, without messages; its tables are copied."""
    tables = graph.tables
    size = np.array([graph.num_nodes, len(tables.first), 0])
    size[2] = len(tables.entry) and tables.entry.max() == np.inf
    return Rest(
        tables=Tables(*(array.copy() for array in tables)),
        to_first=np.zeros(int(tables.to_first[-1])),
        to_second=np.zeros(int(tables.to_second[-1])),
        base_node=graph.base_node.copy(),
        label=graph.label.copy(),
        settled=graph.settled.copy(),
        reduced=np.zeros(graph.num_strategies),
        size=size,
        numbers=np.array([graph.constant, -np.inf, np.inf, -np.inf, 0.0]),
        choice=graph.settled.copy(),
    )


def copied(rest: Rest) -> Rest:
    """Return a copy of what is left, in arrays of its size; `choice` and costs are its own too."""
    tables = left(rest)
    num_nodes, num_edges = int(rest.size[0]), int(rest.size[1])
    strategies = int(tables.offset[num_nodes])
    return Rest(
        tables=Tables(*(array.copy() for array in tables)),
        to_first=rest.to_first[: tables.to_first[num_edges]].copy(),
        to_second=rest.to_second[: tables.to_second[num_edges]].copy(),
        base_node=rest.base_node[:num_nodes].copy(),
        label=rest.label[:strategies].copy(),
        settled=rest.settled.copy(),
        reduced=rest.reduced[:strategies].copy(),
        size=rest.size.copy(),
        numbers=rest.numbers.copy(),
        choice=rest.choice.copy(),
    )


def graph_of(rest: Rest) -> TableGraph:
    """Return what is left as a graph with the same base."""
    num_nodes = int(rest.size[0])
    tables = Tables(*(array.copy() for array in left(rest)))
    none = np.zeros(0, dtype=np.int64)
    return TableGraph(
        tables=tables,
        rows=make_rows(len(tables.cost), none, none, np.zeros(0), np.zeros(0)),
        constant=float(rest.numbers[CONSTANT]),
        base_node=rest.base_node[:num_nodes].copy(),
        label=rest.label[: len(tables.cost)].copy(),
        settled=rest.settled.copy(),
        base_time=none,
    )


@njit(cache=True)
def left(rest: Rest) -> Tables:
    """Return the tables of what is left."""
    tables = rest.tables
    n, m = rest.size[0], rest.size[1]
    return Tables(
        tables.offset[: n + 1],
        tables.cost[: tables.offset[n]],
        tables.first[:m],
        tables.second[:m],
        tables.entry_offset[: m + 1],
        tables.entry[: tables.entry_offset[m]],
        tables.incident_offset[: n + 1],
        tables.incident[: tables.incident_offset[n]],
        tables.to_first[: m + 1],
        tables.to_second[: m + 1],
    )


@njit(cache=True)
def take(rest: Rest, x: np.ndarray, cost: float) -> None:
    """Note the choice `x` [nodes] of what is left if its `cost` is the least."""
    if cost >= rest.numbers[OBJECTIVE]:
        return
    rest.numbers[OBJECTIVE] = cost
    for i in range(len(rest.choice)):
        rest.choice[i] = rest.settled[i]
    for i in range(rest.size[0]):
        rest.choice[rest.base_node[i]] = rest.label[rest.tables.offset[i] + x[i]]


@njit(cache=True)
def climb(rest: Rest, steps: int, ceiling: float) -> int:
    """Raise the bound by so many steps at most, of choices that cost at most `ceiling`; return
    PROVED if the best known choice is the least of them, EMPTY if there is none, else OPEN.
    """
    numbers, size = rest.numbers, rest.size
    most = 1
    for i in range(size[0]):
        most = max(most, rest.tables.offset[i + 1] - rest.tables.offset[i])
    belief = np.empty(most + 1)
    x = np.zeros(size[0], np.int64)
    none = np.empty(0)
    active = np.empty(rest.tables.offset[size[0]], np.bool_)
    quiet, since = 0, 0
    for step in range(steps):
        n = size[0]
        tables = left(rest)
        since += 1
        prune = since >= (_EARLY if step < _FIRST_STEPS else _EVERY) or step == steps - 1
        to = (rest.to_first, rest.to_second, belief, x)
        messages.sweep(tables, tables.cost, *to, none, True)
        reduced = rest.reduced[: tables.offset[n]] if prune else none
        value = messages.sweep(tables, tables.cost, *to, reduced, False)
        numbers[VISITED] += len(tables.entry)
        bound = value + numbers[CONSTANT] - MARGIN * (abs(value) + abs(numbers[CONSTANT]))
        gain = bound - numbers[BOUND]
        numbers[BOUND] = max(bound, numbers[BOUND])
        messages.decode(tables, tables.cost, rest.to_first, belief, x)
        cost = messages.choice_cost(tables, tables.cost, x[:n]) + numbers[CONSTANT]
        take(rest, x, cost)
        known = numbers[OBJECTIVE]
        if known < np.inf and known - numbers[BOUND] <= ROUNDING * abs(known):
            return PROVED
        cutoff = min(known + MARGIN * abs(known), ceiling)
        if numbers[BOUND] > cutoff:
            return EMPTY
        if prune:
            since = 0
            numbers[REDUCED] = bound
            gone = 0
            for v in range(tables.offset[n]):
                active[v] = bound + reduced[v] <= cutoff
                gone += not active[v]
            if gone > _FEW_GONE * tables.offset[n]:
                if not keep(rest, active):
                    return EMPTY
                if not size[0]:
                    take(rest, x, numbers[CONSTANT])
                    numbers[BOUND] = numbers[OBJECTIVE]
                    return PROVED
        quiet = 0 if gain > MARGIN * abs(numbers[BOUND]) else quiet + 1
        if quiet >= _QUIET and prune:
            return OPEN
    return OPEN


@njit(cache=True)
def keep(rest: Rest, active: np.ndarray) -> bool:
    """Keep only the `active` [strategies], and of them those with an allowed partner in every
    table; return False if a node has none.

    In place: nothing moves to a later position.
    """
    place, lone, fresh = _places(rest, active)
    if fresh < 0:
        return False
    _move(rest, rest, rest.tables.cost, active, place, lone, fresh)
    return True


@njit(cache=True)
def part_of(rest: Rest, active: np.ndarray) -> tuple[bool, Rest]:
    """Return whether every node has one of the `active` [strategies], and if so what `keep` leaves
    of a copy, in arrays of its size: the rest itself, which may be many times as large, is not
    copied."""
    place, lone, fresh = _places(rest, active)
    if fresh < 0:
        return False, rest
    tables, n, m = rest.tables, rest.size[0], rest.size[1]
    counts = np.zeros(n, np.int64)
    strategies, incident = 0, 0
    for i in range(n):
        if place[i] >= 0:
            for v in range(tables.offset[i], tables.offset[i + 1]):
                counts[i] += active[v]
            strategies += counts[i]
    edges, entries, first, second = 0, 0, 0, 0
    for e in range(m):
        i, j = tables.first[e], tables.second[e]
        if place[i] >= 0 and place[j] >= 0:
            edges, incident = edges + 1, incident + 2
            entries += counts[i] * counts[j]
            first, second = first + counts[i], second + counts[j]
    part = Rest(
        Tables(
            np.zeros(fresh + 1, np.int64),
            np.empty(strategies),
            np.empty(edges, np.int64),
            np.empty(edges, np.int64),
            np.zeros(edges + 1, np.int64),
            np.empty(entries),
            np.zeros(fresh + 1, np.int64),
            np.empty(incident, np.int64),
            np.zeros(edges + 1, np.int64),
            np.zeros(edges + 1, np.int64),
        ),
        np.empty(first),
        np.empty(second),
        np.empty(fresh, np.int64),
        np.empty(strategies, np.int64),
        rest.settled.copy(),
        np.empty(strategies),
        rest.size.copy(),
        rest.numbers.copy(),
        rest.choice.copy(),
    )
    _move(rest, part, tables.cost.copy(), active, place, lone, fresh)
    return True, part


@njit(cache=True)
def _places(rest: Rest, active: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return of each node its number among those that stay open, -1 if it does not, and the only
    strategy of one that does not; and how many do, -1 if a node has no strategy."""
    offset, n = rest.tables.offset, rest.size[0]
    if rest.size[2]:
        _drop_unsupported(rest.tables, rest.size[1], active)
    place = np.full(n, -1)
    lone = np.zeros(n, np.int64)
    fresh = 0
    for i in range(n):
        count = 0
        for v in range(offset[i], offset[i + 1]):
            if active[v]:
                count += 1
                lone[i] = v
        if count == 0:
            return place, lone, -1
        if count > 1:
            place[i] = fresh
            fresh += 1
    return place, lone, fresh


@njit(cache=True)
def _move(
    rest: Rest,
    to: Rest,
    cost: np.ndarray,
    active: np.ndarray,
    place: np.ndarray,
    lone: np.ndarray,
    fresh: int,
) -> None:
    """Move what is left of `rest` to the beginning of the arrays of `to`, which may be itself.
    `cost`: those of `rest`, which are changed."""
    tables, there = rest.tables, to.tables
    offset, n = tables.offset, rest.size[0]
    number = np.full(rest.size[1], -1)  # of edges that stay
    constant = _move_edges(rest, to, cost, active, place, lone, number)
    put, incident, start, begin = 0, 0, 0, 0
    for i in range(n):
        stop, end = offset[i + 1], tables.incident_offset[i + 1]
        if place[i] < 0:
            constant += cost[lone[i]]
            to.settled[rest.base_node[i]] = rest.label[lone[i]]
        else:
            there.offset[place[i]], there.incident_offset[place[i]] = put, incident
            to.base_node[place[i]] = rest.base_node[i]
            for v in range(start, stop):
                if active[v]:
                    there.cost[put] = cost[v]
                    to.label[put] = rest.label[v]
                    to.reduced[put] = rest.reduced[v]
                    put += 1
            for z in range(begin, end):
                e = number[tables.incident[z]]
                if e >= 0:
                    there.incident[incident] = e
                    incident += 1
        start, begin = stop, end
    there.offset[fresh], there.incident_offset[fresh] = put, incident
    to.size[0] = fresh
    to.numbers[CONSTANT] += constant


@njit(cache=True)
def _move_edges(
    rest: Rest,
    to: Rest,
    cost: np.ndarray,
    active: np.ndarray,
    place: np.ndarray,
    lone: np.ndarray,
    number: np.ndarray,
) -> float:
    """Move the tables and messages of two open nodes, add up the others into `cost`; return that of
    those of two settled nodes. `number` gets the new numbers of edges, -1 for those gone."""
    tables, there = rest.tables, to.tables
    offset, num_edges = tables.offset, rest.size[1]
    settled = 0.0
    put, edges, to_first, to_second = 0, 0, 0, 0
    for e in range(num_edges):
        i, j = tables.first[e], tables.second[e]
        height, width = offset[i + 1] - offset[i], offset[j + 1] - offset[j]
        p, a, b = tables.entry_offset[e], tables.to_first[e], tables.to_second[e]
        if place[i] >= 0 and place[j] >= 0:
            number[e] = edges
            there.first[edges], there.second[edges] = place[i], place[j]
            there.entry_offset[edges] = put
            there.to_first[edges], there.to_second[edges] = to_first, to_second
            edges += 1
            for k in range(height):
                if active[offset[i] + k]:
                    to.to_first[to_first] = rest.to_first[a + k]
                    to_first += 1
                    for q in range(width):
                        if active[offset[j] + q]:
                            there.entry[put] = tables.entry[p + q]
                            put += 1
                p += width
            for q in range(width):
                if active[offset[j] + q]:
                    to.to_second[to_second] = rest.to_second[b + q]
                    to_second += 1
            continue
        if place[j] >= 0:
            p += (lone[i] - offset[i]) * width
            for q in range(width):
                cost[offset[j] + q] += tables.entry[p + q]
        elif place[i] >= 0:
            p += lone[j] - offset[j]
            for k in range(height):
                cost[offset[i] + k] += tables.entry[p + k * width]
        else:
            settled += tables.entry[p + (lone[i] - offset[i]) * width + lone[j] - offset[j]]
    there.entry_offset[edges] = put
    there.to_first[edges], there.to_second[edges] = to_first, to_second
    to.size[1] = edges
    return settled


@njit(cache=True)
def _drop_unsupported(tables: Tables, num_edges: int, active: np.ndarray) -> None:
    """Clear `active` for strategies without an allowed partner among the active."""
    offset = tables.offset
    changed = True
    while changed:
        changed = False
        for e in range(num_edges):
            i, j = tables.first[e], tables.second[e]
            height, width = offset[i + 1] - offset[i], offset[j + 1] - offset[j]
            p = tables.entry_offset[e]
            rows, columns = np.zeros(height, np.bool_), np.zeros(width, np.bool_)
            for k in range(height):
                for q in range(width if active[offset[i] + k] else 0):
                    if active[offset[j] + q] and tables.entry[p + k * width + q] < np.inf:
                        rows[k] = True
                        columns[q] = True
            for k in range(height):
                if active[offset[i] + k] and not rows[k]:
                    active[offset[i] + k] = False
                    changed = True
            for q in range(width):
                if active[offset[j] + q] and not columns[q]:
                    active[offset[j] + q] = False
                    changed = True
