"""What each equation of a stage costs under a choice of strategies, as arrays to gather from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EquationSeconds:
    """Seconds per step of `count` equations at `num_sizes` sizes, the first of which the problem
    was built at: a cost per strategy, and per pair of strategies.

    costs    (position of the equation, node, by size [strategies] seconds)
    edges    (position, first node, second node, by size [strategies of first, of second] seconds)
    """

    def __init__(
        self,
        count: int,
        num_sizes: int,
        costs: Sequence[tuple[int, int, tuple[np.ndarray, ...]]],
        edges: Sequence[tuple[int, int, int, tuple[np.ndarray, ...]]],
    ) -> None:
        self._count, self._costs = count, costs
        both = (*costs, *edges)
        self._at = np.array([one[0] for one in both], dtype=np.int64)
        self._first = np.array([one[1] for one in both], dtype=np.int64)
        self._second = np.array([0] * len(costs) + [one[2] for one in edges], dtype=np.int64)
        width = [one[3][0].shape[1] for one in edges]
        self._stride = np.array([1] * len(costs) + width, dtype=np.int64)
        self._paired = np.array([0] * len(costs) + [1] * len(edges), dtype=np.int64)
        places: dict[int, int] = {}
        distinct: list[tuple[np.ndarray, ...]] = []
        length = 0
        start = []
        for priced in (*(one[2] for one in costs), *(one[3] for one in edges)):
            if id(priced) not in places:
                places[id(priced)] = length
                distinct.append(priced)
                length += priced[0].size
            start.append(places[id(priced)])
        self._start = np.array(start, dtype=np.int64)
        self._tables = tuple(
            np.concatenate([priced[size].ravel() for priced in distinct] or [np.zeros(0)])
            for size in range(num_sizes)
        )

    def under(self, choice: Sequence[int], size: int = 0) -> np.ndarray:
        """Return [equations] seconds under a choice."""
        chosen = np.array(choice, dtype=np.int64)
        place = self._start + chosen[self._first] * self._stride
        place += chosen[self._second] * self._paired
        return np.bincount(self._at, self._tables[size][place], self._count)

    def least(self, size: int = 0) -> np.ndarray:
        """Return [equations] seconds that no choice can beat, without conversions."""
        seconds = np.zeros(self._count)
        for position, _, priced in self._costs:
            seconds[position] += priced[size].min()
        return seconds
