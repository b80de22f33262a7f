"""Choices that keep the memory rows, found by decoding, repair and neighbourhood moves.

A start is decoded from messages, improved by forest moves with memory priced, repaired and
descended under hard rows -> PrimalSearch.construct(). From then on ball moves with priced memory,
checked against the hard rows, improve the best choice -> PrimalSearch.improve().
"""

from __future__ import annotations

import math
import time

import numpy as np

from ilp_sharding.bound import messages
from ilp_sharding.choice import ball_minimisation, forest_moves
from ilp_sharding.problem.flat_graph import TableGraph, make_rows

_SIZES = np.array([8, 25, 60, 150, 400, 1000], dtype=np.int64)


class PrimalSearch:
    """The best choice `x` of a graph, its `cost`, and what the moves have learnt."""

    def __init__(self, graph: TableGraph, seed: int) -> None:
        self.graph = graph
        self.random = np.random.default_rng(seed)
        ball_minimisation.seed_random(seed % 2**31)
        self.x: np.ndarray | None = None
        self.cost = math.inf
        self.sizes = _SIZES[_SIZES < max(graph.num_nodes, 9)]
        self.scores = np.ones(len(self.sizes))
        self.table_limit = 2e4
        self._polish_sizes = self.sizes[(self.sizes >= 25) & (self.sizes <= 400)]
        none = np.zeros(0, dtype=np.int64)
        self._no_rows = make_rows(graph.num_strategies, none, none, np.zeros(0), np.zeros(0))

    def construct(
        self, x: np.ndarray, price: np.ndarray, rounds: int = 12, polish: int = 0
    ) -> float:
        """Return the cost of a choice grown from `x` [nodes] under prices [strategies], or inf.

        `polish` ball moves with memory priced come before the repair.
        """
        grown = self._grow(x, price, rounds, polish)
        return math.inf if grown is None else self.take(grown)

    def _grow(
        self, x: np.ndarray, price: np.ndarray, rounds: int, polish: int
    ) -> np.ndarray | None:
        tables, rows = self.graph.tables, self.graph.rows
        x = x.copy()
        priced = tables._replace(cost=tables.cost + price)
        for _ in range(rounds):
            if not forest_moves.forest_move(
                tables, priced.cost, self.random.permutation(len(x)), x
            ):
                break
        if polish and len(self._polish_sizes):
            ball_minimisation.search_neighbourhoods(
                priced,
                self._no_rows,
                price,
                x,
                np.zeros(0),
                self._polish_sizes,
                np.ones(len(self._polish_sizes)),
                self.table_limit,
                polish,
            )
        left = self.left(x)
        if not forest_moves.repair(tables, rows, priced.cost, x, left, 600):
            return None
        forest_moves.descend(tables, rows, self.random.permutation(len(x)), x, left, 6)
        return x

    def oscillate(self, price: np.ndarray, until: float, batch: int = 40) -> None:
        """Improve the best choice by leaving the memory rows and coming back.

        Each round moves a current choice a little under slightly disturbed prices without rows,
        repairs it, improves it under the rows, and keeps it if it costs at most a little more than
        the best.
        """
        if self.x is None:
            return
        tables, rows = self.graph.tables, self.graph.rows
        current = self.x.copy()
        allowed = 3e-3
        while time.perf_counter() < until:
            disturbed = price * np.exp(0.15 * self.random.standard_normal())
            polish = int(self.random.integers(5, batch))
            x = self._grow(current, disturbed, int(self.random.integers(0, 3)), polish)
            if x is None:
                continue
            left = self.left(x)
            ball_minimisation.search_neighbourhoods(
                tables, rows, price, x, left, self.sizes, self.scores, self.table_limit, batch
            )
            cost = self.take(x)
            if cost <= self.cost + allowed * abs(self.cost):
                current = x
                allowed = max(0.97 * allowed, 2e-4)
            else:
                current = self.x.copy()

    def take(self, x: np.ndarray) -> float:
        """Return the cost of `x`, which must keep all rows, and keep it if it is the best."""
        cost = (
            messages.choice_cost(self.graph.tables, self.graph.tables.cost, x) + self.graph.constant
        )
        if cost < self.cost:
            self.x, self.cost = x.copy(), cost
        return cost

    def improve(self, price: np.ndarray, until: float, batch: int = 10) -> None:
        """Improve the best choice by ball moves until `time.perf_counter()` passes `until`."""
        if self.x is None:
            return
        tables, rows = self.graph.tables, self.graph.rows
        x = self.x.copy()
        left = self.left(x)
        while time.perf_counter() < until:
            gained = ball_minimisation.search_neighbourhoods(
                tables, rows, price, x, left, self.sizes, self.scores, self.table_limit, batch
            )
            if gained > 0:
                self.take(x)

    def left(self, x: np.ndarray) -> np.ndarray:
        """Return slack minus usage [times] of `x`."""
        used = np.zeros(self.graph.num_times + 1)
        messages.usage_profile(self.graph.tables, self.graph.rows, x, used)
        return self.graph.rows.slack - used[: self.graph.num_times]
