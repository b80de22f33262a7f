"""The problem as a graph of tables, and the exact reductions that shrink it.

Nodes hold a cost vector over the strategies still alive; neighbours share one table (parallel edges
are added up, self-edges fold their diagonal into the node). The reductions, run until none applies:

- a strategy of infinite cost, or with no finite entry in some table, is dropped (arc consistency);
- a node with one strategy left folds its table rows into its neighbours;
- a table a_i + b_j is folded into the two node costs;
- if every strategy of a allows exactly one strategy f(a) of b, node b is contracted into a.

None of them removes a choice of finite cost, so they are exact under any memory limit
-> implemented in Network.reduce(); undone by Network.expand().
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from ilp_sharding.exceptions import NoAssignment, OutOfTime
from ilp_sharding.problem.instance import Instance

_ROUNDING = 1e-13  # of the entries, far more than separable tables leave


class Network:
    """A mutable graph of tables over the nodes of an `Instance`.

    `cost[i]` [alive strategies of i]; `kept[i]` the original strategy of each; `tables[i][j]`
    [alive of i, alive of j], with `tables[j][i]` its transpose; `alive[i]` is False once i has been
    contracted into `parent[i]`, whose original strategy s decides `image[i][s]`.
    """

    def __init__(self, instance: Instance) -> None:
        offset = instance.offset.tolist()
        count = np.diff(instance.offset)
        self.num_nodes = len(count)
        self.count: list[int] = count.tolist()
        self.cost = [instance.cost[a:b].copy() for a, b in zip(offset, offset[1:], strict=False)]
        self.kept = [np.arange(k) for k in self.count]
        self.tables: list[dict[int, np.ndarray]] = [{} for _ in self.count]
        self.alive = [True] * self.num_nodes
        self.parent = [-1] * self.num_nodes
        self.image: list[np.ndarray | None] = [None] * self.num_nodes
        self._contracted: list[int] = []
        self._queue: deque[tuple[int, int]] = deque()
        self._queued: set[tuple[int, int]] = set()
        bounds = instance.table_offset.tolist()
        reducible = _reducible(instance).tolist()
        for e, (a, b) in enumerate(instance.edges.tolist()):
            table = instance.table[bounds[e] : bounds[e + 1]].reshape(self.count[a], self.count[b])
            if a == b:
                self.cost[a] += table.diagonal()
                continue
            if reducible[e] or b in self.tables[a]:
                self._push(a, b)
            self._add_table(a, b, table)

    def reduce(self, until: float = math.inf) -> None:
        """Apply the reductions until none applies; raise NoAssignment if nothing finite is left.

        Raises OutOfTime once `time.perf_counter()` passes `until`.
        """
        self.restrict({node: cost < np.inf for node, cost in enumerate(self.cost)}, until)

    def restrict(self, masks: Mapping[int, np.ndarray], until: float = math.inf) -> None:
        """Keep only the strategies of each node where its mask is true, and reduce further."""
        smaller = {node: mask for node, mask in masks.items() if not mask.all()}
        self._mask(smaller)
        for node in masks:
            if node in smaller or len(self.cost[node]) == 1:
                self._check_node(node)
        self._drain(until)

    def open_nodes(self) -> list[int]:
        """Return the nodes that still have a choice: alive, with two strategies or more."""
        return [i for i in range(self.num_nodes) if self.alive[i] and len(self.cost[i]) > 1]

    def constant(self) -> float:
        """Return the cost of the nodes whose strategy is settled."""
        return float(
            sum(
                self.cost[i][0]
                for i in range(self.num_nodes)
                if self.alive[i] and len(self.cost[i]) == 1
            )
        )

    def num_entries(self) -> int:
        """Return the number of entries of the tables left."""
        return sum(table.size for tables in self.tables for table in tables.values()) // 2

    def maps(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return (root [nodes], map per node): map[i][s] is i's strategy when its root's is s, or
        -1.
        """
        root = np.arange(self.num_nodes)
        full: list[np.ndarray] = [np.arange(k) for k in self.count]
        for node in reversed(self._contracted):
            above = self.parent[node]
            image = self.image[node]
            assert image is not None
            composed = full[above]
            full[node] = np.where(composed >= 0, image[composed], -1)
            root[node] = root[above]
        return root, full

    def expand(self, chosen: dict[int, int]) -> np.ndarray:
        """Return the choice [nodes] of original strategies for alive positions per root."""
        choice = np.zeros(self.num_nodes, dtype=np.int64)
        for node in range(self.num_nodes):
            if self.alive[node]:
                choice[node] = self.kept[node][chosen.get(node, 0)]
        for node in reversed(self._contracted):
            image = self.image[node]
            assert image is not None
            choice[node] = image[choice[self.parent[node]]]
        return choice

    def components(self, nodes: Iterable[int]) -> list[list[int]]:
        """Return the connected components of `nodes` through their tables, each sorted."""
        wanted = set(nodes)
        result = []
        while wanted:
            stack = [wanted.pop()]
            found = []
            while stack:
                node = stack.pop()
                found.append(node)
                for other in self.tables[node]:
                    if other in wanted:
                        wanted.remove(other)
                        stack.append(other)
            result.append(sorted(found))
        return sorted(result)

    def _add_table(self, a: int, b: int, table: np.ndarray) -> None:
        if b in self.tables[a]:
            table = self.tables[a][b] + table
        self.tables[a][b] = table
        self.tables[b][a] = table.T

    def _drop_table(self, a: int, b: int) -> None:
        del self.tables[a][b]
        del self.tables[b][a]

    def _push(self, a: int, b: int) -> None:
        key = (a, b) if a < b else (b, a)
        if key not in self._queued:
            self._queued.add(key)
            self._queue.append(key)

    def _drain(self, until: float = math.inf) -> None:
        while self._queue:
            if time.perf_counter() > until:
                raise OutOfTime
            a, b = key = self._queue.popleft()
            self._queued.discard(key)
            if b in self.tables[a]:
                self._check_edge(a, b)

    def _mask(self, masks: Mapping[int, np.ndarray]) -> None:
        """Keep only the strategies of each node where its mask is true."""
        kept = {node: np.flatnonzero(mask) for node, mask in masks.items()}
        for node, those in kept.items():
            if not len(those):
                raise NoAssignment
            self.cost[node] = self.cost[node][those]
            self.kept[node] = self.kept[node][those]
            for other, table in self.tables[node].items():
                if other in kept:
                    if other < node:
                        continue  # done from there
                    table = table.take(kept[other], axis=1)
                smaller = table.take(those, axis=0)
                self.tables[node][other] = smaller
                self.tables[other][node] = smaller.T
                self._push(node, other)

    def _check_node(self, node: int) -> None:
        """Drop infinite strategies of `node`; fold it into its neighbours if one is left."""
        stack = [node]
        while stack:
            node = stack.pop()
            finite = self.cost[node] < np.inf
            if not finite.all():
                self._mask({node: finite})
            if len(self.cost[node]) == 1:
                for other in list(self.tables[node]):
                    self.cost[other] = self.cost[other] + self.tables[node][other][0]
                    self._drop_table(node, other)
                    stack.append(other)

    def _check_edge(self, a: int, b: int) -> None:
        table = self.tables[a][b]
        finite = table < np.inf
        allowed = np.count_nonzero(finite)
        if allowed == table.size:
            self._fold_if_separable(a, b, table)
            return
        supported = {a: np.logical_or.reduce(finite, 1), b: np.logical_or.reduce(finite, 0)}
        smaller = {i: mask for i, mask in supported.items() if np.count_nonzero(mask) < len(mask)}
        rows, columns = table.shape
        if smaller:
            self._push(a, b)
            self._mask(smaller)
            self._check_node(a)
            self._check_node(b)
        elif allowed == rows and (allowed > columns or len(self.tables[a]) >= len(self.tables[b])):
            self._contract(a, b, table, finite)
        elif allowed == columns:
            self._contract(b, a, table.T, finite.T)

    def _fold_if_separable(self, a: int, b: int, table: np.ndarray) -> None:
        """Fold a table a_i + b_j into the node costs (to 4 units in the last place)."""
        first, last = table.item(0, 0) + table.item(-1, -1), table.item(0, -1) + table.item(-1, 0)
        if abs(first - last) > _ROUNDING * (abs(first) + abs(last)):
            return
        rows = table.min(1)
        rest = table - rows[:, None]
        columns = rest.min(0)
        rest -= columns
        if rest.max() > 0 and (rest > 4 * np.finfo(np.float64).eps * np.abs(table)).any():
            return
        self.cost[a] = self.cost[a] + rows
        self.cost[b] = self.cost[b] + columns
        self._drop_table(a, b)

    def _contract(self, a: int, b: int, table: np.ndarray, finite: np.ndarray) -> None:
        """Contract b into a, where `finite` has one true entry f(i) in every row i of a."""
        f = finite.argmax(1)
        self.cost[a] = self.cost[a] + self.cost[b][f] + table[np.arange(len(f)), f]
        self._drop_table(a, b)
        for other in list(self.tables[b]):
            lifted = self.tables[b][other][f]
            self._drop_table(b, other)
            self._add_table(a, other, lifted)
            self._push(a, other)
        self.alive[b] = False
        self.parent[b] = a
        image = np.full(self.count[a], -1, dtype=np.int64)
        image[self.kept[a]] = self.kept[b][f]
        self.image[b] = image
        self._contracted.append(b)
        self._check_node(a)


def _reducible(instance: Instance) -> np.ndarray:
    """Return [edges] whether a table may be reduced: it has forbidden pairs, or may be separable.

    Of a separable table t, t_ik + t_jl = t_il + t_jk. That is looked at for the first, a middle
    and the last allowed strategy of both ends: it holds for few other tables.
    """
    if not len(instance.edges):
        return np.zeros(0, bool)
    offset, table = instance.offset, instance.table
    first, second = instance.edges[:, 0], instance.edges[:, 1]
    forbidden: np.ndarray = np.maximum.reduceat(table, instance.table_offset[:-1]) == np.inf
    allowed = np.flatnonzero(instance.cost < np.inf)
    begin = np.searchsorted(allowed, offset)
    if (np.diff(begin) == 0).any():  # there is no choice at all
        return forbidden
    probes = [
        allowed[at] - offset[:-1]
        for at in (begin[:-1], (begin[:-1] + begin[1:]) // 2, begin[1:] - 1)
    ]
    width = np.diff(offset)[second]
    entry = [
        [table[instance.table_offset[:-1] + i[first] * width + k[second]] for k in probes]
        for i in probes
    ]
    separable: np.ndarray = ~forbidden
    pairs = ((0, 1), (1, 2), (0, 2))
    with np.errstate(invalid="ignore"):  # of forbidden pairs
        for (i, j), (k, l) in itertools.product(pairs, pairs):
            sums = entry[i][k] + entry[j][l], entry[i][l] + entry[j][k]
            size = np.abs(sums[0]) + np.abs(sums[1])
            separable &= np.abs(sums[0] - sums[1]) <= _ROUNDING * size
    return np.asarray(forbidden | separable)
