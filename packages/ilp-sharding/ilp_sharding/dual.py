"""Lower bounds from memory multipliers and messages.

For multipliers lambda_t >= 0 on the memory rows and messages m (see `messages`),

    bound(lambda, m) = TRW-S bound of [ cost + sum_t lambda_t usage_t ] - sum_t lambda_t slack_t.

-> DualAscent.evaluate(). The multipliers go along the excess g, usage - slack, of an exponential
average of the minimisers (the idea of the volume algorithm, Barahona, Anbil 2000), with a Polyak
length towards a level above the best bound,

    lambda <- max(0, lambda + min(best + delta - bound, 2 delta) / |g|^2  g),

where delta, at first a share of the bound, grows once half of it has been gained; when some steps
gain nothing it shrinks, and the next step starts afresh from the best (Brannlund 1995). No cost of
a choice is needed, so the first multipliers are good before the first choice is known
-> DualAscent.step().
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from ilp_sharding import messages
from ilp_sharding.table_graph import TableGraph

_FIRST_RISE = 0.2
_PATIENCE = 6


class DualAscent:
    """Multipliers and messages of one graph; `best` is the bound of `best_multipliers`."""

    def __init__(self, graph: TableGraph) -> None:
        self.graph = graph
        tables = graph.tables
        self.to_first = np.zeros(int(tables.to_first[-1]))
        self.to_second = np.zeros(int(tables.to_second[-1]))
        self.belief = np.zeros(int(np.diff(tables.offset).max(initial=1)) + 1)
        self.forward = np.zeros(graph.num_nodes, dtype=np.int64)
        self.backward = np.zeros(graph.num_nodes, dtype=np.int64)
        self.price = np.zeros(graph.num_strategies)
        self.forbidden: np.ndarray | None = None
        self.multipliers = np.zeros(graph.num_times)
        self.best = -math.inf
        self.best_multipliers = np.zeros(graph.num_times)
        self.best_messages = (self.to_first.copy(), self.to_second.copy())
        self.scale = max(float(np.abs(graph.rows.slack).max(initial=0.0)), 1e-300)
        self.rise = math.inf  # of the level over the best bound; inf: not yet known
        self._anchor = -math.inf
        self.steps = 0
        self.mixture: np.ndarray | None = None
        self._average: np.ndarray | None = None
        self._since = 0

    def evaluate(self, multipliers: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (bound, excess [times] of the minimisers, scaled) of `multipliers`, after two
        sweeps.
        """
        graph = self.graph
        tables, rows = graph.tables, graph.rows
        cost = self.priced(multipliers)
        used = np.zeros((2, graph.num_times + 1))
        messages.forward_sweep(
            tables, cost, self.to_first, self.to_second, self.belief, self.forward
        )
        messages.usage_profile(tables, rows, self.forward, used[0])
        value = messages.backward_sweep(
            tables, cost, self.to_first, self.to_second, self.belief, self.backward
        )
        messages.usage_profile(tables, rows, self.backward, used[1])
        excess = used.mean(0)[: graph.num_times] - rows.slack
        return self._value(value, multipliers), excess / self.scale

    def priced(self, multipliers: np.ndarray) -> np.ndarray:
        """Return node costs [strategies] with memory priced; `self.price` gets the prices."""
        messages.memory_prices(self.graph.rows, multipliers, self.price)
        cost = self.graph.tables.cost + self.price
        if self.forbidden is not None:
            cost[self.forbidden] = np.inf
        return cost

    def sweep(self, cost: np.ndarray) -> None:
        """Update all messages for node costs `cost`, multipliers untouched."""
        tables = self.graph.tables
        messages.forward_sweep(
            tables, cost, self.to_first, self.to_second, self.belief, self.forward
        )
        messages.backward_sweep(
            tables, cost, self.to_first, self.to_second, self.belief, self.backward
        )

    def begin(
        self,
        multipliers: np.ndarray,
        start: tuple[np.ndarray, np.ndarray],
        forbidden: np.ndarray,
    ) -> None:
        """Start afresh from `multipliers` and messages `start` with some strategies forbidden."""
        self.forbidden = forbidden
        self.multipliers = multipliers.copy()
        self.best_multipliers = multipliers.copy()
        self.to_first[:], self.to_second[:] = start
        self.best_messages = (start[0].copy(), start[1].copy())
        self.best = -math.inf
        self.rise = math.inf
        self._anchor = -math.inf
        self._average = None
        self.mixture = None
        self._since = 0

    def run(self, until: float, target: Callable[[], float], patience: int = 10**9) -> float:
        """Raise the bound until `time.perf_counter()` passes `until`; return the best.

        `target` returns the best known cost. Ends early when `patience` steps gained nothing.
        """
        quiet = 0
        while time.perf_counter() < until and quiet < patience:
            before = self.best
            self.step(target())
            quiet = 0 if self.best > before + 1e-6 * abs(before) else quiet + 1
            if not self.graph.num_times and self._since > 15:
                break
        return self.best

    def step(self, target: float, memory: float = 0.3) -> float:
        """Do one step towards the level; return the bound it saw.

        `target` is the best known cost, inf if none; `memory` the weight of the new minimisers.
        """
        self.steps += 1
        bound, excess = self.evaluate(self.multipliers)
        if self._average is None:
            self._average = excess
        else:
            self._average = (1 - memory) * self._average + memory * excess
        if self.mixture is None:
            self.mixture = self._indicator()
        else:
            self.mixture *= 1 - memory
            self._mix(memory)
        if math.isinf(self.rise):
            self.rise = max(_FIRST_RISE * abs(bound), 1e-300)
        if self._note(bound) or not self.graph.num_times:
            return bound
        if math.isfinite(target):
            self.rise = min(self.rise, max(target - self.best, 1e-5 * abs(self.best), 1e-300))
        direction = np.where((self.multipliers <= 0) & (self._average < 0), 0.0, self._average)
        length = max(float(direction @ direction), 1e-12)
        change = min(self.best + self.rise - bound, 2.0 * self.rise) / length
        self.multipliers = np.maximum(0.0, self.multipliers + change * direction / self.scale)
        return bound

    def _note(self, bound: float) -> bool:
        """Keep the multipliers if `bound` is the best so far, and adapt the level.

        Returns whether the search went back to the best multipliers.
        """
        least = 0.02 * self.rise if self.graph.num_times else 1e-6 * abs(self.best)
        self._since = 0 if bound > self.best + least else self._since + 1
        if bound > self.best:
            self.best = bound
            self.best_multipliers = self.multipliers.copy()
            self.best_messages = (self.to_first.copy(), self.to_second.copy())
        if self.best >= self._anchor + 0.5 * self.rise:
            self.rise *= 1.5 if math.isfinite(self._anchor) else 1.0
            self._anchor = self.best
        if self._since > _PATIENCE and self.graph.num_times:
            self._since = 0
            self._anchor = self.best
            self.rise *= 0.5
            if self.rise < 1e-6 * abs(self.best):
                self.rise = 1e-3 * abs(self.best)
            self._average = None
            self.restore()
            return True
        return False

    def _indicator(self) -> np.ndarray:
        self.mixture = np.zeros(self.graph.num_strategies)
        self._mix(1.0)
        return self.mixture

    def _mix(self, share: float) -> None:
        assert self.mixture is not None
        first = self.graph.tables.offset[:-1]
        self.mixture[first + self.forward] += share / 2
        self.mixture[first + self.backward] += share / 2

    def restore(self) -> None:
        """Go back to the best multipliers and their messages."""
        self.multipliers = self.best_multipliers.copy()
        self.to_first[:], self.to_second[:] = self.best_messages

    def reduced(self, sweeps: int = 3) -> list[tuple[float, np.ndarray]]:
        """Return (bound, reduced cost [strategies]) pairs at the best multipliers.

        Every choice using strategy v costs at least bound + reduced[v], for each of the pairs.
        """
        self.restore()
        cost = self.priced(self.multipliers)
        tables = self.graph.tables
        result = []
        for _ in range(sweeps):
            messages.forward_sweep(
                tables, cost, self.to_first, self.to_second, self.belief, self.forward
            )
            reduced = np.zeros(self.graph.num_strategies)
            value = messages.reduced_costs(
                tables, cost, self.to_first, self.to_second, self.belief, reduced
            )
            bound = self._value(value, self.multipliers)
            self.best = max(self.best, bound)
            result.append((bound, reduced))
        return result

    def decoded(self) -> np.ndarray:
        """Return a choice [nodes] decoded from the messages (memory priced, not limited)."""
        return self.decode(self.priced(self.multipliers))

    def decode(self, cost: np.ndarray) -> np.ndarray:
        """Return a choice [nodes] decoded from the messages under node costs `cost`."""
        x = np.zeros(self.graph.num_nodes, dtype=np.int64)
        messages.decode(self.graph.tables, cost, self.to_first, self.belief, x)
        return x

    def _value(self, value: float, multipliers: np.ndarray) -> float:
        """Return the bound with its constant, less a margin for rounding."""
        priced = float(multipliers @ self.graph.rows.slack)
        margin = 1e-12 * (abs(value) + abs(priced) + abs(self.graph.constant))
        return value - priced + self.graph.constant - margin
