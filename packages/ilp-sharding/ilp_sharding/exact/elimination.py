"""Exact minimisation over a graph of tables by eliminating one node after the other.

Eliminating node i with tables theta and earlier messages m gives, over its remaining neighbours
(its scope) S_i,

    m_i(x_S) = min_k  theta_i(k) + sum_j theta_ij(x_j, k) + sum of messages that mention i

-> Elimination.solve(). The sum of the final scalars is the minimum; going back in reverse order
gives a minimiser. A second sweep in reverse order gives the min-marginal of every strategy, the
least cost of any choice that uses it -> Elimination.min_marginals(). The order is greedy: the node
with the smallest table first. Cost: the sum of the tables' sizes, `Elimination.work`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ilp_sharding.compiled_loops import loaded
from ilp_sharding.exceptions import OutOfTime

if TYPE_CHECKING:
    from ilp_sharding.exact.elimination_loops import Steps

_STEPS_WORK = 1e6  # table entries between two looks at the clock


class Elimination:
    """An elimination order of `nodes` and the tables it needs; solved for any node costs.

    `tables[i][j]` [strategies of i, strategies of j] for both directions; entries to nodes outside
    `nodes` are ignored. `sizes[i]` is the number of strategies; `largest` the entries of the
    largest table; `children[t]` the steps whose messages the t-th one takes.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        sizes: Mapping[int, int],
        tables: Sequence[Mapping[int, np.ndarray]],
        work_limit: float = math.inf,
        *,
        plan_only: bool = False,
    ) -> None:
        self.order, scopes, self.work = _greedy_order(nodes, sizes, tables, work_limit)
        self.complete = len(self.order) == len(nodes)
        self.largest = max(
            (
                math.prod(sizes[j] for j in scope) * sizes[node]
                for node, scope in zip(self.order, scopes, strict=True)
            ),
            default=0,
        )
        self.scopes = scopes
        if not self.complete or plan_only:
            return
        position = {node: t for t, node in enumerate(self.order)}
        self.scopes = [sorted(scope, key=position.__getitem__, reverse=True) for scope in scopes]
        self.sizes = {node: sizes[node] for node in self.order}
        self.children: list[list[int]] = [[] for _ in self.order]
        self._terms: list[list[np.ndarray | int]] = []
        for t, node in enumerate(self.order):
            scope = self.scopes[t]
            if scope:
                self.children[position[scope[-1]]].append(t)
            fixed: list[np.ndarray | int] = []  # along the last axis of the scope,
            varying: list[np.ndarray | int] = []  # and not
            for axis, other in enumerate(scope):
                if other in tables[node]:
                    shape = [1] * (len(scope) + 1)
                    shape[axis], shape[-1] = sizes[other], sizes[node]
                    table = np.ascontiguousarray(tables[node][other].T).reshape(shape)
                    (varying if shape[-2] > 1 else fixed).append(table)
            for child in self.children[t]:
                (varying if scope and scope[-1] in scopes[child] else fixed).append(child)
            self._terms.append(fixed + varying)
        self._steps: tuple[Steps, np.ndarray] | None = None

    def solve(
        self, costs: Mapping[int, np.ndarray], *, until: float = math.inf
    ) -> tuple[float, dict[int, int]]:
        """Return (minimum, minimiser as {node: strategy}) for node costs `costs[i]` [strategies].

        The minimum is inf if every choice is forbidden. Raises OutOfTime once
        `time.perf_counter()` passes `until`.
        """
        if loaded("exact.elimination_loops") and self.order:
            return self._solve_compiled(costs, until)
        messages, _ = self._upward(costs, until)
        value = 0.0
        for message, scope in zip(messages, self.scopes, strict=True):
            if not scope:
                value += float(message)  # as compiled: `sum` of Python 3.12 rounds once at the end
        return value, self._walk_back(costs, messages)

    def min_marginals(
        self, costs: Mapping[int, np.ndarray], *, until: float = math.inf
    ) -> dict[int, np.ndarray]:
        """Return per node [strategies] the least total cost of a choice using each strategy."""
        messages, cliques = self._upward(costs, until, keep=True)
        return {
            self.order[t]: belief.min(tuple(range(belief.ndim - 1)))
            for t, _, belief in self._downward(messages, cliques, until)
        }

    def completions(
        self, costs: Mapping[int, np.ndarray], *, until: float = math.inf
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return per step (its message [..., scope], least cost of all else [likewise]).

        `costs[i]` [..., strategies] may be of several problems at once.
        """
        messages, cliques = self._upward(costs, until, keep=True)
        outside = [np.zeros(0)] * len(self.order)
        for t, rest, _ in self._downward(messages, cliques, until):
            outside[t] = rest
        return messages, outside

    def _upward(
        self, costs: Mapping[int, np.ndarray], until: float, *, keep: bool = False
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return per step (message [..., scope], clique [..., scope, own strategies] if `keep`)."""
        messages: list[np.ndarray] = []
        cliques: list[np.ndarray] = []
        for t, node in enumerate(self.order):
            if time.perf_counter() > until:
                raise OutOfTime
            first = costs[node].shape[:-1]
            clique = costs[node].reshape(*first, *[1] * len(self.scopes[t]), -1)
            for term in self._terms[t]:
                clique = clique + self._fitted_term(term, t, messages)
            messages.append(clique.min(-1))
            if keep:
                cliques.append(np.broadcast_to(clique, (*first, *self.shape(t))))
        return messages, cliques

    def _downward(
        self, messages: list[np.ndarray], cliques: list[np.ndarray], until: float
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (step, least cost of all else [..., scope], least cost of a whole choice for every
        entry of its clique), the last step first."""
        total = sum(messages[t] for t, scope in enumerate(self.scopes) if not scope)
        outside: list[np.ndarray] = [np.zeros(())] * len(self.order)
        for t in reversed(range(len(self.order))):
            if time.perf_counter() > until:
                raise OutOfTime
            axes = [*self.scopes[t], self.order[t]]
            first = cliques[t].ndim - len(axes)
            with np.errstate(invalid="ignore"):  # of forbidden entries
                if not self.scopes[t]:
                    outside[t] = np.asarray(total - messages[t])
                belief = cliques[t] + outside[t][..., None]
                for child in self.children[t]:
                    inside = set(self.scopes[child])
                    drop = tuple(first + a for a, node in enumerate(axes) if node not in inside)
                    rest = (belief.min(drop) if drop else belief) - messages[child]
                    outside[child] = np.where(messages[child] < np.inf, rest, np.inf)
            yield t, outside[t], belief

    def _solve_compiled(
        self, costs: Mapping[int, np.ndarray], until: float
    ) -> tuple[float, dict[int, int]]:
        """Return the same as `solve`, from compiled loops."""
        from ilp_sharding.exact import elimination_loops as loops

        if self._steps is None:
            self._steps = loops.steps_of(self.order, self.scopes, self.sizes, self._terms)
        steps, values = self._steps
        np.concatenate([costs[node] for node in self.order], out=values[: int(steps.size.sum())])
        work = np.cumsum(steps.axis_size.prod(1) * steps.size, dtype=float)
        value, done = 0.0, 0
        while done < len(self.order):
            if time.perf_counter() > until:
                raise OutOfTime
            reach = (work[done - 1] if done else 0.0) + _STEPS_WORK
            last = max(done + 1, int(np.searchsorted(work, reach)))
            value += loops.minimise(steps, values, done, last)
            done = last
        x = np.zeros(len(self.order), dtype=np.int64)
        loops.walk_back(steps, values, x)
        return value, dict(zip(self.order, x.tolist(), strict=True))

    def shape(self, t: int) -> tuple[int, ...]:
        """Return the shape of clique t: the nodes of its scope, then its own."""
        return tuple(self.sizes[j] for j in [*self.scopes[t], self.order[t]])

    def clique(self, t: int, cost: np.ndarray) -> np.ndarray:
        """Return `cost` [..., strategies of the t-th node] plus its tables, before messages."""
        for term in self._terms[t]:
            if isinstance(term, np.ndarray):
                cost = cost + term
        return cost

    def fitted(self, message: np.ndarray, child: int, t: int) -> np.ndarray:
        """Return the message of `child` with axes of size 1 where clique t has other nodes.

        Axes before those of the scope stay.
        """
        axes = self.scopes[t] + [self.order[t]]
        inside = set(self.scopes[child])
        first = message.shape[: message.ndim - len(inside)]
        return message.reshape(*first, *[self.sizes[j] if j in inside else 1 for j in axes])

    def _fitted_term(
        self, term: np.ndarray | int, t: int, messages: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return a term of step t, [nodes of its scope, its own strategies]."""
        if isinstance(term, np.ndarray):
            return term
        return self.fitted(messages[term], term, t)

    def _walk_back(
        self, costs: Mapping[int, np.ndarray], messages: Sequence[np.ndarray]
    ) -> dict[int, int]:
        chosen: dict[int, int] = {}
        for t in reversed(range(len(self.order))):
            node = self.order[t]
            total = costs[node]
            place = [chosen[j] for j in self.scopes[t]]
            for term in self._terms[t]:
                array = self._fitted_term(term, t, messages)
                at = tuple(p if n > 1 else 0 for p, n in zip(place, array.shape, strict=False))
                total = total + array[at]
            chosen[node] = int(np.argmin(total))
        return chosen


def _greedy_order(
    nodes: Sequence[int],
    sizes: Mapping[int, int],
    tables: Sequence[Mapping[int, np.ndarray]],
    work_limit: float,
) -> tuple[list[int], list[list[int]], float]:
    """Return (order, scope per node, total table size), cut short past `work_limit`."""
    inside = set(nodes)
    neighbours = {i: {j for j in tables[i] if j in inside} for i in nodes}
    weight = {i: math.log(sizes[i]) for i in nodes}
    load = {i: weight[i] + sum(weight[j] for j in neighbours[i]) for i in nodes}
    heap = [(load[i], i) for i in nodes]
    heapq.heapify(heap)
    order: list[int] = []
    scopes: list[list[int]] = []
    work = 0.0
    done: set[int] = set()
    while heap:
        size, node = heapq.heappop(heap)
        if node in done or abs(size - load[node]) > 1e-9:
            continue
        work += math.exp(min(size, 600.0))
        if work > work_limit:
            return order, scopes, work
        done.add(node)
        scope = list(neighbours[node])
        order.append(node)
        scopes.append(scope)
        for a in scope:
            neighbours[a].discard(node)
            load[a] -= weight[node]
        for position, a in enumerate(scope):
            for b in scope[position + 1 :]:
                if b not in neighbours[a]:
                    neighbours[a].add(b)
                    neighbours[b].add(a)
                    load[a] += weight[b]
                    load[b] += weight[a]
        for a in scope:
            heapq.heappush(heap, (load[a], a))
    return order, scopes, work
