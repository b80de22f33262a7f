"""Best-first branch and bound: the open tree node of least bound is split next.

Tree nodes whose bound passes the cutoff are left out, so the least bound of the open ones bounds
all choices below the cutoff. A leaf, a tree node that cannot be split, keeps its bound
-> BestFirst.bound.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

TreeNode = TypeVar("TreeNode")


class BestFirst(Generic[TreeNode]):
    """The open tree nodes with their bounds, and the least bound of a leaf."""

    def __init__(self, bound: float, root: TreeNode) -> None:
        self.steps = 0  # tree nodes split or found to be leaves
        self._count = 0
        self._heap: list[tuple[float, int, TreeNode]] = [(bound, 0, root)]
        self._leaf = math.inf

    @property
    def done(self) -> bool:
        """Whether no tree node below the cutoff is open. A proof if `bound` is above it too."""
        return not self._heap

    @property
    def bound(self) -> float:
        """The bound on every choice, as far as below the cutoffs used so far."""
        return min(self._heap[0][0] if self._heap else math.inf, self._leaf)

    def least(self) -> TreeNode | None:
        """Return the open tree node of least bound, None if there is none."""
        return self._heap[0][2] if self._heap else None

    def take(self, cutoff: float) -> tuple[float, TreeNode] | None:
        """Remove and return (bound, tree node) of least bound, None if none is below `cutoff`."""
        while self._heap and self._heap[0][0] > cutoff:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        self.steps += 1
        bound, _, node = heapq.heappop(self._heap)
        return bound, node

    def add(self, bound: float, node: TreeNode) -> None:
        """Open a tree node."""
        self._count += 1
        heapq.heappush(self._heap, (bound, self._count, node))

    def keep(self, bound: float) -> None:
        """Note that a tree node of that bound is a leaf."""
        self._leaf = min(self._leaf, bound)
