"""Lower bounds from memory multipliers and messages.

For multipliers lambda_t >= 0 on the memory rows and messages m (see `messages`),

    bound(lambda, m) = TRW-S bound of [ cost + sum_t lambda_t usage_t ] - sum_t lambda_t slack_t.

-> DualAscent.evaluate(). The multipliers follow Polyak's step along a long average of the excess
g = usage - slack of the minimisers (the idea of the volume algorithm, Barahona, Anbil 2000),

    mean <- (1 - w) mean + w g,        w = 0.02,
    lambda <- max(0, lambda + f (target - bound) / |mean|^2  mean).

The minimisers of single sweeps are noisy: they need not agree along edges, and jump with the
multipliers. Their average tends to the fractional minimiser of the relaxation, whose excess is a
useful direction. `target` is the cost of the best choice, or a share above the best bound until
one is known. It is above what the bound can reach, so f shrinks whenever some steps gain nothing,
and the next step starts afresh from the best multipliers; once f is negligible only the messages go
on -> DualAscent.step(). When strategies drop out, the multipliers and messages of what is left go
on on the smaller graph -> DualAscent.carried().
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from ilp_sharding.bound import messages
from ilp_sharding.problem.flat_graph import TableGraph

_WEIGHT = 0.02  # of the new minimisers in the average
_STRETCH = 0.5  # f at the start
_SHRINK = 0.7
_RESTRETCH = 0.02  # f at least, when the graph has become smaller
_PATIENCE = 10  # steps without gain after which f shrinks
_GAIN = 1e-6  # least gain, of the bound, that counts
_NONE = np.zeros(0)  # reduced costs
_RISE = 0.1  # of the target over the best bound while no choice is known


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
        self.scale = max(_largest(graph.rows.slack), _largest(graph.rows.change), 1e-300)
        self.largest = max(_largest(tables.cost), _largest(tables.entry), 1e-300)
        self.stretch = _STRETCH  # f of the next step
        self.patience = _PATIENCE
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
        if not graph.num_times:
            return self.sweep(cost), np.zeros(0)
        used = np.zeros((2, graph.num_times + 1))
        self._send(cost, self.forward)
        messages.usage_profile(tables, rows, self.forward, used[0])
        value = self._send(cost, self.backward)
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

    def sweep(self, cost: np.ndarray) -> float:
        """Update all messages for node costs `cost`; return the bound if the present multipliers
        priced them.
        """
        self._send(cost, self.forward)
        value = self._send(cost, self.backward)
        return self._value(value, self.multipliers)

    def begin(
        self,
        multipliers: np.ndarray,
        start: tuple[np.ndarray, np.ndarray],
        forbidden: np.ndarray,
        stretch: float,
    ) -> None:
        """Start afresh from `multipliers` and messages `start` with some strategies forbidden.

        `stretch` is f of the first step.
        """
        self.forbidden = forbidden
        self.multipliers = multipliers.copy()
        self.best_multipliers = multipliers.copy()
        self.to_first[:], self.to_second[:] = start
        self.best_messages = (start[0].copy(), start[1].copy())
        self.best = -math.inf
        self.stretch = stretch
        self._average = None
        self.mixture = None
        self._since = 0

    def carried(self, graph: TableGraph) -> DualAscent:
        """Return an ascent on `graph`, a restriction of this graph, that goes on from here."""
        result = DualAscent(graph)
        result.multipliers = self._moved(graph.base_time)
        node = np.searchsorted(self.graph.base_node, graph.base_node)
        old, new = self.graph.tables, graph.tables
        width = int(max(self.graph.label.max(initial=0), graph.label.max(initial=0))) + 1
        names = _owner(old.offset) * width + self.graph.label
        local = np.searchsorted(names, node[_owner(new.offset)] * width + graph.label)
        local -= old.offset[node[_owner(new.offset)]]
        keys = old.first * self.graph.num_nodes + old.second
        order = np.argsort(keys)
        edge = order[
            np.searchsorted(keys[order], node[new.first] * self.graph.num_nodes + node[new.second])
        ]
        for end, was, now, source, target in (
            (new.first, old.to_first, new.to_first, self.best_messages[0], result.to_first),
            (new.second, old.to_second, new.to_second, self.best_messages[1], result.to_second),
        ):
            owner = _owner(now)
            strategy = new.offset[end][owner] + np.arange(len(owner)) - now[owner]
            target[:] = source[was[edge][owner] + local[strategy]]
        result.stretch = min(max(4.0 * self.stretch, _RESTRETCH), _STRETCH)
        return result

    def _moved(self, base_time: np.ndarray) -> np.ndarray:
        """Return the best multipliers for the times `base_time` that are left.

        A time is left out when a neighbour exceeds the limit whenever it does, so its multiplier
        goes to the neighbour on the side where the present minimisers use more.
        """
        kept = np.searchsorted(self.graph.base_time, base_time)
        result = self.best_multipliers[kept]
        gone = self.best_multipliers > 0
        gone[kept] = False
        if not gone.any() or not len(kept):
            return result
        used = np.zeros(self.graph.num_times + 1)
        messages.usage_profile(self.graph.tables, self.graph.rows, self.backward, used)
        excess = used[: self.graph.num_times] - self.graph.rows.slack
        lost = np.flatnonzero(gone)
        after = np.minimum(np.searchsorted(kept, lost), len(kept) - 1)
        before = np.maximum(after - 1, 0)
        target = np.where(excess[kept[after]] >= excess[kept[before]], after, before)
        np.add.at(result, target, self.best_multipliers[lost])
        return result

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

    def step(self, target: float, weight: float = _WEIGHT) -> float:
        """Do one step towards `target`, the best known cost, inf if none; return the bound it saw.

        `weight` is the share of the new minimisers in the average.
        """
        self.steps += 1
        bound, excess = self.evaluate(self.multipliers)
        if self._average is None:
            self._average = excess
        else:
            self._average = (1 - weight) * self._average + weight * excess
        if self.mixture is None:
            self.mixture = self._indicator()
        else:
            self.mixture *= 1 - weight
            self._mix(weight)
        if self._note(bound) or not self.graph.num_times:
            return bound
        size = abs(self.best) if abs(self.best) > 1e-9 * self.largest else self.largest
        rise = max(min(target, self.best + _RISE * size) - bound, 1e-9 * size)
        direction = np.where((self.multipliers <= 0) & (self._average < 0), 0.0, self._average)
        change = self.stretch * rise / max(float(direction @ direction), 1e-12)
        self.multipliers = np.maximum(0.0, self.multipliers + change * direction / self.scale)
        return bound

    def _note(self, bound: float) -> bool:
        """Keep the multipliers if `bound` is the best so far; shorten the steps if it long was not.

        Returns whether the search went back to the best multipliers.
        """
        self._since = 0 if bound > self.best + _GAIN * abs(self.best) else self._since + 1
        if bound > self.best:
            self.best = bound
            self.best_multipliers = self.multipliers.copy()
            self.best_messages = (self.to_first.copy(), self.to_second.copy())
        if self._since <= self.patience or not self.graph.num_times:
            return False
        self._since = 0
        self.stretch *= _SHRINK
        self._average = None
        self.restore()
        return True

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

    def reduce(self, cost: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (bound, reduced cost [strategies]) for node costs `cost`, after a sweep back."""
        reduced = np.zeros(self.graph.num_strategies)
        value = self._send(cost, np.empty_like(self.backward), reduced)
        return self._value(value, self.multipliers), reduced

    def reduced(self, sweeps: int = 3) -> list[tuple[float, np.ndarray]]:
        """Return (bound, reduced cost [strategies]) pairs at the best multipliers.

        Every choice using strategy v costs at least bound + reduced[v], for each of the pairs.
        """
        self.restore()
        cost = self.priced(self.multipliers)
        result = []
        for _ in range(sweeps):
            self._send(cost, self.forward)
            bound, reduced = self.reduce(cost)
            self.best = max(self.best, bound)
            result.append((bound, reduced))
        return result

    def decoded(self) -> np.ndarray:
        """Return a choice [nodes] decoded from the messages (memory priced, not limited)."""
        return self.decode(self.priced(self.multipliers))

    def _send(self, cost: np.ndarray, x: np.ndarray, reduced: np.ndarray = _NONE) -> float:
        """Sweep forward if `x` is `self.forward`, else back; return the bound of the tables."""
        return messages.sweep(
            *(self.graph.tables, cost, self.to_first, self.to_second, self.belief),
            *(x, reduced, x is self.forward),
        )

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


def _owner(bounds: np.ndarray) -> np.ndarray:
    """Return for every position the group it lies in; group g is `bounds[g]:bounds[g + 1]`."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def _largest(values: np.ndarray) -> float:
    """Return the largest magnitude of the finite `values`, none of which is -inf."""
    finite = values < np.inf
    return max(
        float(values.max(initial=0.0, where=finite)), -float(values.min(initial=0.0, where=finite))
    )
