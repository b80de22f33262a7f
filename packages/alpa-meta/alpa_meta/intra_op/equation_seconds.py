"""What each equation of a stage costs under a choice of strategies, as arrays to gather from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
        self._stride = np.array([s[1] if len(s) > 1 else 1 for s in shapes], dtype=np.int64)
        self._paired = np.array([len(s) - 1 for s in shapes], dtype=np.int64)
        self.start = np.array(start, dtype=np.int64)
        # By size, the seconds of all that is priced, one after the other.
        self.tables = tuple(
            np.concatenate([priced[size].ravel() for priced in distinct] or [np.zeros(0)])
            for size in range(num_sizes)
        )

    def under(self, choice: Sequence[int], size: int = 0) -> np.ndarray:
        """Return [entries] seconds under a choice."""
        chosen = np.array(choice, dtype=np.int64)
        place = self.start + chosen[self._first] * self._stride
        place += chosen[self._second] * self._paired
        found: np.ndarray = self.tables[size][place]
        return found


class EquationSeconds:
    """Seconds per step of `count` equations at `num_sizes` sizes, the first of which the problem
    was built at: a cost per strategy, and per pair of strategies.

    `costs` are (position of the equation, node, [strategies] seconds).
    """

    def __init__(
        self,
        count: int,
        num_sizes: int,
        costs: Sequence[tuple[int, int, Priced]],
        edges: Sequence[Edge],
    ) -> None:
        self.count, self.costs, self.edges = count, costs, edges
        self._at = np.array(
            [*(one[0] for one in costs), *(one.position for one in edges)], dtype=np.int64
        )
        pairs = [(node, node, priced) for _, node, priced in costs]
        self._priced = PricedPairs(
            num_sizes, pairs + [(one.first, one.second, one.seconds) for one in edges]
        )
        self._start, self.tables = self._priced.start, self._priced.tables

    def under(self, choice: Sequence[int], size: int = 0) -> np.ndarray:
        """Return [equations] seconds under a choice."""
        return np.bincount(self._at, self._priced.under(choice, size), self.count)

    def least(self, size: int = 0) -> np.ndarray:
        """Return [equations] seconds that no choice can beat, without conversions."""
        seconds = np.zeros(self.count)
        for position, _, priced in self.costs:
            seconds[position] += priced[size].min()
        return seconds

    def problem_of(self, inside: np.ndarray, table: np.ndarray) -> ShardingProblem:
        """Return what the equations `inside` [equations] choose among themselves, once each, with
        seconds like one of the `tables`: what they read from others costs nothing."""
        problem = ProblemBuilder()

        def node(number: int, count: int) -> int:
            return problem.node(number, str(number), [""] * count)

        starts = self._start.tolist()
        for (position, number, priced), start in zip(self.costs, starts, strict=False):
            if inside[position]:
                count = len(priced[0])
                problem.add_cost(node(number, count), table[start : start + count])
        for edge, start in zip(self.edges, starts[len(self.costs) :], strict=True):
            if inside[edge.position] and inside[edge.home]:
                shape, size = edge.seconds[0].shape, edge.seconds[0].size
                first, second = map(node, (edge.first, edge.second), shape)
                problem.add_edge(first, second, table[start : start + size].reshape(shape))
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
