"""Branch and bound over the strategies of nodes that use much memory.

A node of the tree forbids some strategies (infinite cost) and has a bound from a few steps of the
multiplier ascent, started from its parent's multipliers. The open tree node of least bound is
split: the graph node whose average minimiser mixes strategies of the most different memory price is
divided into its cheap and its expensive strategies -> Branching.step().
"""

from __future__ import annotations

import math

import numpy as np
from attrs import define

from ilp_sharding.bound.dual_ascent import DualAscent
from ilp_sharding.branching.best_first import BestFirst

_STEPS = 20  # of ascent per tree node: short ones, as the parent's multipliers are nearly right
_STRETCH = 0.03
_WEIGHT = 0.3
_PATIENCE = 3


@define
class _Open:
    """An open tree node: forbidden strategies, multipliers, mixture of its minimisers."""

    forbidden: np.ndarray
    multipliers: np.ndarray
    mixture: np.ndarray
    messages: tuple[np.ndarray, np.ndarray]


class Branching(BestFirst[_Open]):
    """A tree of restrictions of the graph of `dual`, whose bound is the root's."""

    def __init__(self, dual: DualAscent, steps_per_node: int = _STEPS) -> None:
        self.dual = dual
        dual.patience = _PATIENCE
        self.steps_per_node = steps_per_node
        dual.restore()
        graph = dual.graph
        assert dual.mixture is not None
        root = _Open(
            forbidden=np.zeros(graph.num_strategies, bool),
            multipliers=dual.best_multipliers.copy(),
            mixture=dual.mixture.copy(),
            messages=(dual.to_first.copy(), dual.to_second.copy()),
        )
        super().__init__(dual.best, root)
        self._owner = np.repeat(np.arange(graph.num_nodes), np.diff(graph.tables.offset))

    def step(self, cutoff: float) -> float:
        """Split the open tree node of least bound; return the bound on every choice."""
        taken = self.take(cutoff)
        if taken is None:
            return self.bound
        bound, parent = taken
        groups = self._split(parent)
        if groups is None:
            self.keep(bound)
            return self.bound
        node, cheap = groups
        offset = self.dual.graph.tables.offset
        start, stop = int(offset[node]), int(offset[node + 1])
        for keep in (cheap, ~cheap):
            forbidden = parent.forbidden.copy()
            forbidden[start:stop] |= ~keep
            child_bound, child = self._explore(parent, forbidden, max(bound, -math.inf), cutoff)
            if child_bound <= cutoff:
                self.add(child_bound, child)
        return self.bound

    def _split(self, tree_node: _Open) -> tuple[int, np.ndarray] | None:
        """Return (graph node, mask of its cheaper strategies) to branch on, None if nothing is
        mixed.
        """
        graph = self.dual.graph
        self.dual.priced(tree_node.multipliers)
        price = np.where(tree_node.forbidden, 0.0, self.dual.price)
        weight = np.where(tree_node.forbidden, 0.0, tree_node.mixture)
        offset = graph.tables.offset
        total = np.add.reduceat(weight, offset[:-1])
        weight = weight / np.maximum(total, 1e-12)[self._owner]
        mean = np.add.reduceat(weight * price, offset[:-1])
        spread = np.add.reduceat(weight * np.abs(price - mean[self._owner]), offset[:-1])
        open_count = np.add.reduceat((~tree_node.forbidden).astype(np.int64), offset[:-1])
        spread[open_count < 2] = -1.0
        node = int(np.argmax(spread))
        if spread[node] <= 1e-9:
            mixing = 1.0 - np.maximum.reduceat(weight, offset[:-1])
            mixing[open_count < 2] = -1.0
            node = int(np.argmax(mixing))
            if mixing[node] < 0:
                return None
            inside = weight[offset[node] : offset[node + 1]]
            key = -inside
        else:
            key = price[offset[node] : offset[node + 1]]
        allowed = ~tree_node.forbidden[offset[node] : offset[node + 1]]
        values = np.unique(key[allowed])
        if len(values) < 2:
            first = int(np.flatnonzero(allowed)[0])
            return node, np.arange(len(key)) == first
        share = weight[offset[node] : offset[node + 1]]
        below = np.array([share[allowed & (key <= v)].sum() for v in values[:-1]])
        cut = int(np.argmin(np.abs(below - 0.5)))
        return node, key <= values[cut]

    def _explore(
        self, parent: _Open, forbidden: np.ndarray, floor: float, cutoff: float
    ) -> tuple[float, _Open]:
        """Return (bound, tree node) of the restriction after a few steps of ascent."""
        dual = self.dual
        dual.begin(parent.multipliers, parent.messages, forbidden, _STRETCH)
        for _ in range(self.steps_per_node):
            dual.step(cutoff if math.isfinite(cutoff) else floor + abs(floor), _WEIGHT)
            if dual.best > cutoff:
                break
        assert dual.mixture is not None
        return max(dual.best, floor), _Open(
            forbidden=forbidden,
            multipliers=dual.best_multipliers.copy(),
            mixture=dual.mixture.copy(),
            messages=dual.best_messages,
        )
