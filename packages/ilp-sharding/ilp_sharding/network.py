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

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from ilp_sharding.elimination import OutOfTime
from ilp_sharding.instance import Instance


class NoAssignment(Exception):
    """Every choice uses a forbidden strategy or pair."""


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
        for e, (a, b) in enumerate(instance.edges.tolist()):
            table = instance.table[bounds[e] : bounds[e + 1]].reshape(self.count[a], self.count[b])
            if a == b:
                self.cost[a] += table.diagonal()
            else:
                self._add_table(a, b, table)

    def reduce(self, until: float = math.inf) -> None:
        """Apply the reductions until none applies; raise NoAssignment if nothing finite is left.

        Raises OutOfTime once `time.perf_counter()` passes `until`.
        """
        for node in range(self.num_nodes):
            self._check_node(node)
        for a in range(self.num_nodes):
            for b in self.tables[a]:
                if a < b:
                    self._push(a, b)
        self._drain(until)

    def restrict(self, masks: Mapping[int, np.ndarray]) -> None:
        """Keep only the strategies of each node where its mask is true, and reduce further."""
        for node, mask in masks.items():
            if not mask.all():
                self._mask(node, mask)
        for node in masks:
            self._check_node(node)
        self._drain()

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

    def _mask(self, node: int, mask: np.ndarray) -> None:
        if not mask.any():
            raise NoAssignment
        self.cost[node] = self.cost[node][mask]
        self.kept[node] = self.kept[node][mask]
        for other, table in self.tables[node].items():
            smaller = np.ascontiguousarray(table[mask])
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
                self._mask(node, finite)
            if len(self.cost[node]) == 1:
                for other in list(self.tables[node]):
                    self.cost[other] = self.cost[other] + self.tables[node][other][0]
                    self._drop_table(node, other)
                    stack.append(other)

    def _check_edge(self, a: int, b: int) -> None:
        table = self.tables[a][b]
        finite = table < np.inf
        if finite.all():
            self._fold_if_separable(a, b, table)
            return
        allowed_a, allowed_b = finite.sum(1), finite.sum(0)
        if allowed_a.min() == 0 or allowed_b.min() == 0:
            self._push(a, b)
            if allowed_a.min() == 0:
                self._mask(a, allowed_a > 0)
            if allowed_b.min() == 0:
                self._mask(b, allowed_b > 0)
            self._check_node(a)
            self._check_node(b)
        elif allowed_a.max() == 1 and (
            allowed_b.max() > 1 or len(self.tables[a]) >= len(self.tables[b])
        ):
            self._contract(a, b, table, finite)
        elif allowed_b.max() == 1:
            self._contract(b, a, table.T, finite.T)

    def _fold_if_separable(self, a: int, b: int, table: np.ndarray) -> None:
        """Fold a table a_i + b_j into the node costs (to 4 units in the last place)."""
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
