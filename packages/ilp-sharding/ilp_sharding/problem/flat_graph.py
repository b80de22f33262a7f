"""The reduced problem as flat arrays for the compiled loops, with the way back to its base.

`Tables` and `Rows` are tuples of arrays, the form in which compiled loops take a whole problem. A
`TableGraph` made from a `Network` is a *base*; `TableGraph.restricted` keeps some strategies only,
settles nodes that have one left, and remembers the base labels -> TableGraph.lift().
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from attrs import define

from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import MemoryProfile
from ilp_sharding.problem.reduction import Network


class Tables(NamedTuple):
    """A graph of tables: node costs by `offset`, edge e = (`first`, `second`) with row-major
    entries.

    `incident[incident_offset[i]:incident_offset[i+1]]` are the edges of node i, by the other end;
    `to_first`, `to_second` [edges + 1] delimit the messages of an edge to its two ends.
    """

    offset: np.ndarray
    cost: np.ndarray
    first: np.ndarray
    second: np.ndarray
    entry_offset: np.ndarray
    entry: np.ndarray
    incident_offset: np.ndarray
    incident: np.ndarray
    to_first: np.ndarray
    to_second: np.ndarray


class Rows(NamedTuple):
    """Memory rows: changes of strategy v are `start[v]:start[v+1]` of `time`, `change`; `slack`
    [times].
    """

    start: np.ndarray
    time: np.ndarray
    change: np.ndarray
    slack: np.ndarray


@define(eq=False)
class TableGraph:
    """A problem for the search: tables, memory rows, and labels in its base.

    `constant`: cost of what is settled. `base_node` [nodes], `label` [strategies], `base_time`
    [times]: names in the base; `settled` [base nodes]: the label of settled base nodes, -1 for open
    ones.
    """

    tables: Tables
    rows: Rows
    constant: float
    base_node: np.ndarray
    label: np.ndarray
    settled: np.ndarray
    base_time: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.tables.offset) - 1

    @property
    def num_strategies(self) -> int:
        return int(self.tables.offset[-1])

    @property
    def num_times(self) -> int:
        return len(self.rows.slack)

    def lift(self, x: np.ndarray) -> np.ndarray:
        """Return the labels [base nodes] of the choice `x` [nodes] of this graph."""
        full = self.settled.copy()
        full[self.base_node] = self.label[self.tables.offset[:-1] + x]
        return full

    def lower(self, full: np.ndarray) -> np.ndarray | None:
        """Return the choice of this graph that `full` [base nodes] means, None if dropped."""
        known = self.settled >= 0
        if (full[known] != self.settled[known]).any():
            return None
        owner = np.repeat(np.arange(self.num_nodes), np.diff(self.tables.offset))
        hit = np.flatnonzero(self.label == full[self.base_node][owner])
        if len(hit) != self.num_nodes:
            return None
        return np.asarray(hit - self.tables.offset[:-1])

    def consistent(self) -> TableGraph | None:
        """Return the graph without strategies of infinite cost or without an allowed partner.

        None if some node has no strategy left.
        """
        from ilp_sharding.problem import graph_loops  # numba takes a moment to import

        tables = self.tables
        active = tables.cost < np.inf
        if not graph_loops.drop_unsupported(tables, active):
            return None
        return self if active.all() else self.restricted(active)

    def restricted(self, active: np.ndarray) -> TableGraph:
        """Return the graph with only the strategies where `active` [strategies] is true.

        Every node must keep at least one.
        """
        from ilp_sharding.problem import graph_loops

        tables, rows = self.tables, self.rows
        offset = tables.offset
        counts = (
            np.add.reduceat(active.astype(np.int64), offset[:-1]) if self.num_nodes else offset[:0]
        )
        open_node = counts > 1
        owner = np.repeat(np.arange(self.num_nodes), np.diff(offset))
        lone = np.flatnonzero(active & ~open_node[owner])
        settled = self.settled.copy()
        settled[self.base_node[owner[lone]]] = self.label[lone]
        both = open_node[tables.first] & open_node[tables.second]
        entry = np.empty(int((counts[tables.first] * counts[tables.second])[both].sum()))
        cost = tables.cost.copy()
        constant = self.constant + float(cost[lone].sum())
        constant += graph_loops.keep_active(tables, active, open_node, cost, entry)
        place = np.cumsum(open_node) - 1
        kept = active & open_node[owner]
        slack = rows.slack.copy()
        entry_owner = np.repeat(np.arange(len(active)), np.diff(rows.start))
        is_lone = np.zeros(len(active), bool)
        is_lone[lone] = True
        gone = is_lone[entry_owner]
        used = np.bincount(rows.time[gone], weights=rows.change[gone], minlength=len(slack) + 1)
        slack -= np.cumsum(used)[: len(slack)]
        stay = kept[entry_owner]
        new_strategy = np.cumsum(kept) - 1
        new_offset = np.concatenate([[0], np.cumsum(counts[open_node])]).astype(np.int64)
        return TableGraph(
            tables=make_tables(
                new_offset,
                cost[kept],
                place[tables.first[both]],
                place[tables.second[both]],
                entry,
            ),
            rows=make_rows(
                int(kept.sum()),
                new_strategy[entry_owner[stay]],
                rows.time[stay],
                rows.change[stay],
                slack,
            ),
            constant=constant,
            base_node=self.base_node[open_node],
            label=self.label[kept],
            settled=settled,
            base_time=self.base_time,
        )


def table_graph(network: Network, memory: MemoryProfile | None) -> TableGraph:
    """Return the base graph over the open nodes of `network`; labels are alive positions.

    `memory` is None if no limit binds.
    """
    nodes = network.open_nodes()
    position = {node: p for p, node in enumerate(nodes)}
    sizes = [len(network.cost[i]) for i in nodes]
    offset = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    ends: list[tuple[int, int]] = []
    pieces: list[np.ndarray] = []
    for node in nodes:
        for other, table in network.tables[node].items():
            if node < other:
                ends.append((position[node], position[other]))
                pieces.append(table)
    cost = np.concatenate([network.cost[i] for i in nodes]) if nodes else np.zeros(0)
    pairs = np.array(ends, dtype=np.int64).reshape(-1, 2)
    entry = np.concatenate([piece.ravel() for piece in pieces]) if pieces else np.zeros(0)
    none = np.zeros(0, np.int64)
    if memory is None:
        rows = make_rows(int(offset[-1]), none, none, np.zeros(0), np.zeros(0))
    else:
        rows = make_rows(
            int(offset[-1]), memory.strategy, memory.time, memory.change, memory.allowed()
        )
    return TableGraph(
        tables=make_tables(offset, cost, pairs[:, 0], pairs[:, 1], entry),
        rows=rows,
        constant=network.constant(),
        base_node=np.arange(len(nodes)),
        label=np.concatenate([np.arange(k) for k in sizes]) if nodes else none,
        settled=np.full(len(nodes), -1),
        base_time=np.arange(len(rows.slack)),
    )


def instance_graph(instance: Instance) -> TableGraph:
    """Return the graph of `instance` without reductions or memory; labels are its strategies.

    Tables are shared, unless edges have to be turned, added up or folded into a node.
    """
    edges, cost, table = instance.edges, instance.cost, instance.table
    first, second = edges[:, 0], edges[:, 1]
    keys = np.sort(first * instance.num_nodes + second)
    if (first >= second).any() or (keys[1:] == keys[:-1]).any():
        edges, cost, table = _turned(instance)
    sizes = np.diff(instance.offset)
    none = np.zeros(0, np.int64)
    return TableGraph(
        tables=make_tables(instance.offset, cost, edges[:, 0], edges[:, 1], table),
        rows=make_rows(len(cost), none, none, np.zeros(0), np.zeros(0)),
        constant=0.0,
        base_node=np.arange(instance.num_nodes),
        label=np.arange(len(cost)) - np.repeat(instance.offset[:-1], sizes),
        settled=np.full(instance.num_nodes, -1),
        base_time=none,
    )


def _turned(instance: Instance) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (edges, node costs, tables) with edges to later nodes only, parallel ones added up."""
    cost, offset = instance.cost.copy(), instance.offset.tolist()
    bounds = instance.table_offset.tolist()
    tables: dict[tuple[int, int], np.ndarray] = {}
    for e, (a, b) in enumerate(instance.edges.tolist()):
        height = offset[a + 1] - offset[a]
        table = instance.table[bounds[e] : bounds[e + 1]].reshape(height, -1)
        if a == b:
            cost[offset[a] : offset[a + 1]] += table.diagonal()
            continue
        key, table = ((a, b), table) if a < b else ((b, a), table.T)
        tables[key] = tables[key] + table if key in tables else table
    edges = np.array(list(tables), dtype=np.int64).reshape(-1, 2)
    entries = [table.ravel() for table in tables.values()]
    return edges, cost, np.concatenate(entries) if entries else np.zeros(0)


def make_tables(
    offset: np.ndarray,
    cost: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    entry: np.ndarray,
) -> Tables:
    """Return the arrays of a graph with edges from `first` to `second` (first < second)."""
    num_nodes = len(offset) - 1
    first, second = np.ascontiguousarray(first), np.ascontiguousarray(second)
    count = np.diff(offset)
    edge = np.arange(len(first))
    node = np.concatenate([first, second])
    other = np.concatenate([second, first])
    order = np.lexsort((other, node))
    degree = np.bincount(node, minlength=num_nodes)
    return Tables(
        offset=offset,
        cost=np.ascontiguousarray(cost, dtype=np.float64),
        first=first,
        second=second,
        entry_offset=_bounds(count[first] * count[second]),
        entry=np.ascontiguousarray(entry, dtype=np.float64),
        incident_offset=_bounds(degree),
        incident=np.concatenate([edge, edge])[order],
        to_first=_bounds(count[first]),
        to_second=_bounds(count[second]),
    )


def make_rows(
    num_strategies: int,
    strategy: np.ndarray,
    time: np.ndarray,
    change: np.ndarray,
    slack: np.ndarray,
) -> Rows:
    """Return memory rows from changes in any order; equal (strategy, time) are added up."""
    num_times = len(slack)
    inside = time < num_times
    strategy, time, change = strategy[inside], time[inside], change[inside]
    key = strategy * np.int64(num_times + 1) + time
    unique, place = np.unique(key, return_inverse=True)
    total = (
        np.bincount(place, weights=change, minlength=len(unique)) if len(unique) else np.zeros(0)
    )
    unique, total = unique[total != 0], total[total != 0]
    owner = unique // (num_times + 1)
    return Rows(
        start=np.searchsorted(owner, np.arange(num_strategies + 1)).astype(np.int64),
        time=(unique % (num_times + 1)).astype(np.int64),
        change=total,
        slack=np.ascontiguousarray(slack, dtype=np.float64),
    )


def _bounds(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
