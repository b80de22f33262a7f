"""What each equation of a stage costs under a choice of strategies, as arrays to gather from."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import NamedTuple, overload

import numpy as np

from alpa_interchange import ShardingProblem
from ilp_sharding.strategies import ProblemBuilder

Priced = tuple[np.ndarray, ...]
"""Seconds per step at the size that a problem is built at, then at the others it is priced at."""


class Edge(NamedTuple):
    """Seconds [strategies of first, of second] that an equation takes to read a value made by the
    one at `home` (itself, if that is none of these)."""

    position: int
    home: int
    first: int
    second: int
    seconds: Priced


class PricedPairs:
    """Seconds at `num_sizes` sizes that depend on the strategies of two nodes each, as arrays to
    gather from: entries are (first node, second node, [first, second] seconds, or [first])."""

    def __init__(self, num_sizes: int, entries: Sequence[tuple[int, int, Priced]]) -> None:
        self._first = np.array([one[0] for one in entries], dtype=np.int64)
        self._second = np.array([one[1] for one in entries], dtype=np.int64)
        places: dict[int, int] = {}
        distinct: list[Priced] = []
        length = 0
        start = []
        for _, _, priced in entries:
            if id(priced) not in places:
                places[id(priced)] = length
                distinct.append(priced)
                length += priced[0].size
            start.append(places[id(priced)])
        shapes = [priced[0].shape for _, _, priced in entries]
        self.length = length  # of each table
        self._stride = np.array([s[1] if len(s) > 1 else 1 for s in shapes], dtype=np.int64)
        self._paired = np.array([len(s) - 1 for s in shapes], dtype=np.int64)
        self.start = np.array(start, dtype=np.int64)
        # By size, the seconds of all that is priced, one after the other.
        self.tables = tuple(
            np.concatenate([priced[size].ravel() for priced in distinct] or [np.zeros(0)])
            for size in range(num_sizes)
        )

    def with_again(self, numbers: Sequence[int]) -> PricedPairs:
        """Return the pairs with the entries of these `numbers` once more at their end; the tables
        are the same."""
        found = copy.copy(self)
        for name in ("_first", "_second", "_stride", "_paired", "start"):
            own = getattr(self, name)
            setattr(found, name, np.concatenate([own, own[list(numbers)]]))
        return found

    def under(self, choice: Sequence[int], size: int = 0) -> np.ndarray:
        """Return [entries] seconds under a choice."""
        chosen = np.array(choice, dtype=np.int64)
        place = self.start + chosen[self._first] * self._stride
        place += chosen[self._second] * self._paired
        found: np.ndarray = self.tables[size][place]
        return found


class Tables(Sequence[np.ndarray]):
    """By size, the seconds of all that is priced, those of several pairs one after the other: put
    together when they are asked for."""

    def __init__(self, *parts: PricedPairs) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0].tables)

    @overload
    def __getitem__(self, size: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, size: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, size: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(size, slice):
            return [self[k] for k in range(len(self))[size]]
        return np.concatenate([part.tables[size] for part in self._parts])


class EquationSeconds:
    """Seconds per step of `count` equations at `num_sizes` sizes, the first of which the problem
    was built at: a cost per strategy, and per pair of strategies.

    `costs` are (position of the equation, node, [strategies] seconds). `priced_edges` are those of
    the `edges`, if known: most of the bytes, and the same however layers recompute.
    """

    def __init__(
        self,
        count: int,
        num_sizes: int,
        costs: Sequence[tuple[int, int, Priced]],
        edges: Sequence[Edge],
        priced_edges: PricedPairs | None = None,
    ) -> None:
        self.count, self.num_sizes, self.costs, self.edges = count, num_sizes, costs, edges
        self._at = np.array(
            [*(one[0] for one in costs), *(one.position for one in edges)], dtype=np.int64
        )
        self._priced = PricedPairs(num_sizes, [(node, node, priced) for _, node, priced in costs])
        self.priced_edges = priced_edges or PricedPairs(
            num_sizes, [(one.first, one.second, one.seconds) for one in edges]
        )
        self._start = np.concatenate(
            [self._priced.start, self.priced_edges.start + self._priced.length]
        )
        self.tables = Tables(self._priced, self.priced_edges)

    def with_costs(self, costs: Sequence[tuple[int, int, Priced]]) -> EquationSeconds:
        """Return the seconds of equations that cost otherwise and convert as these do."""
        return EquationSeconds(self.count, self.num_sizes, costs, self.edges, self.priced_edges)

    def with_again(
        self, costs: Sequence[tuple[int, int, Priced]], positions: Collection[int]
    ) -> EquationSeconds:
        """Return the seconds of twice as many equations, with these `costs`: those at `positions`
        convert once more what they read, as they do here."""
        numbers = [n for n, one in enumerate(self.edges) if one.position in positions]
        again = [
            self.edges[n]._replace(
                position=self.count + self.edges[n].position,
                home=self.count + self.edges[n].position,
            )
            for n in numbers
        ]
        priced = self.priced_edges.with_again(numbers)
        edges = [*self.edges, *again]
        return EquationSeconds(2 * self.count, self.num_sizes, costs, edges, priced)

    def under(self, choice: Sequence[int], size: int = 0) -> np.ndarray:
        """Return [equations] seconds under a choice."""
        priced = [part.under(choice, size) for part in (self._priced, self.priced_edges)]
        return np.bincount(self._at, np.concatenate(priced), self.count)

    def least(self, size: int = 0) -> np.ndarray:
        """Return [equations] seconds that no choice can beat, without conversions."""
        seconds = np.zeros(self.count)
        for position, _, priced in self.costs:
            seconds[position] += priced[size].min()
        return seconds

    def problem_of(
        self, inside: np.ndarray, table: np.ndarray, shares: np.ndarray | None = None
    ) -> ShardingProblem:
        """Return what the equations `inside` [equations] choose among themselves, once each, with
        seconds like one of the `tables`, of which `shares` [equations] count (None: all): what they
        read from others costs nothing."""
        problem = ProblemBuilder()

        def node(number: int, count: int) -> int:
            return problem.node(number, str(number), [""] * count)

        def seconds(position: int, start: int, stop: int) -> np.ndarray:
            own, share = table[start:stop], 1.0 if shares is None else shares[position]
            if not share:  # what cannot be stays so
                return np.where(np.isfinite(own), 0.0, own)
            return own if share == 1 else share * own

        starts = self._start.tolist()
        for (position, number, priced), start in zip(self.costs, starts, strict=False):
            if inside[position]:
                count = len(priced[0])
                problem.add_cost(node(number, count), seconds(position, start, start + count))
        for edge, start in zip(self.edges, starts[len(self.costs) :], strict=True):
            if inside[edge.position] and inside[edge.home]:
                shape, size = edge.seconds[0].shape, edge.seconds[0].size
                first, second = map(node, (edge.first, edge.second), shape)
                own = seconds(edge.position, start, start + size)
                problem.add_edge(first, second, own.reshape(shape))
        return problem.build("part")

    def between(
        self, before: np.ndarray, after: np.ndarray, table: np.ndarray
    ) -> list[tuple[int, int, np.ndarray]]:
        """Return what equations `before` and `after` [equations] read from one another, with
        seconds like one of the `tables`: node before, node after, [before, after] seconds."""
        found = []
        starts = self._start[len(self.costs) :].tolist()
        for edge, start in zip(self.edges, starts, strict=True):
            shape, size = edge.seconds[0].shape, edge.seconds[0].size
            matrix = table[start : start + size].reshape(shape)
            if before[edge.home] and after[edge.position]:
                found.append((edge.first, edge.second, matrix))
            elif after[edge.home] and before[edge.position]:
                found.append((edge.second, edge.first, matrix.T))
        return found
