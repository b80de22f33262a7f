"""A choice that fits a memory limit, and a bound, by giving memory a price.

    L(prices) = min_x [ cost(x) + sum_t price_t (usage_t(x) - limit) ]  <=  cost of what fits

A byte's price is a cost of the node that holds it, a copy's of its edge, so that each value is one
solution of a problem without limit. Every x found is a plane above L, cost(x) + sum_t price_t
(usage_t(x) - limit); the next prices are those of the highest point below all planes (Kelley 1960),
or halfway there from the best prices after a step without gain, until the bound is close to that
height. Where no choice on the way fits, costs are left out: what remains
looks for the least peak, and proves that nothing fits if even that is above the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, evolve, field

from alpa_interchange import ShardingProblem, ShardingSolution
from alpa_meta.intra_op.added_costs import edge_places
from alpa_meta.intra_op.memory_profile import MemoryProfile
from alpa_meta.types import Floats
from ilp_sharding.bound.cutting_planes import highest_point

STEPS = 60  # of the prices
_CLOSE = 1e-4  # share of the highest point that a bound may stay below it
_DEAREST = 10.0  # times the costs: the highest price of the whole limit


@define
class PricedMemory:
    """The search for prices; `choice` is the cheapest found that fits, None if none was found."""

    problem: ShardingProblem
    profile: MemoryProfile
    limit: float
    solve: Callable[[ShardingProblem], ShardingSolution]
    choice: tuple[int, ...] | None = None
    objective: float = math.inf
    lower_bound: float = -math.inf
    least_peak: float = 0.0  # proven: no choice peaks lower
    _prices: dict[int, float] = field(factory=dict)
    _rows: dict[int, tuple[Floats, float]] = field(factory=dict)

    @property
    def times(self) -> tuple[int, ...]:
        """The times at which some choice broke the limit, of those that had a price at the end."""
        priced = tuple(at for at, price in self._prices.items() if price > 0)
        return priced or tuple(self._prices)

    def search(self, free: ShardingSolution, until: float, steps: int = STEPS) -> None:
        """Search until a `time.perf_counter()` or for so many `steps` of each kind, beginning with
        the solution without a limit."""
        self._raise_bound(free, until, steps)
        if self.choice is None:
            self._find_least_peak(until, steps)

    def _raise_bound(self, free: ShardingSolution, until: float, steps: int) -> None:
        """Change prices towards the greatest bound."""
        found, value = free.choice, free.lower_bound or 0.0
        best: Mapping[int, float] = {}
        error = 0.0  # by which the value at the best prices may be too low
        tried = set()
        planes: list[tuple[float, Floats]] = []
        for _ in range(steps):
            if found is None:
                return
            usage = self._offer(found)
            planes.append((self._cost(found), usage))
            halfway = value <= self.lower_bound
            if not halfway:
                self.lower_bound, best = value, dict(self._prices)
                error = self._value(found) - value
            top, prices = self._highest(planes)
            enough = top - self.lower_bound <= _CLOSE * abs(top) + error
            if enough or self.objective <= self.lower_bound or time.perf_counter() > until:
                break
            share = 0.5 if halfway else 1.0
            for at, price in prices.items():
                self._prices[at] = best.get(at, 0.0) + share * (price - best.get(at, 0.0))
            if tuple(self._prices.items()) in tried:
                break  # a choice with a gap may leave the planes as they are
            tried.add(tuple(self._prices.items()))
            found, value = self._priced(self._prices)
        self._prices = {at: best.get(at, 0.0) for at in self._prices}

    def _highest(self, planes: Sequence[tuple[float, Floats]]) -> tuple[float, dict[int, float]]:
        """Return (height, prices) of the highest point below all `planes`, (cost, usage) of
        choices.

        The whole limit is priced at `_DEAREST` times the costs at most.
        """
        times = list(self._prices)
        scale = max(abs(cost) for cost, _ in planes) or 1.0
        height, prices = highest_point(
            np.array([cost for cost, _ in planes]) / scale,
            np.array([usage[times] / self.limit - 1.0 for _, usage in planes]),
            _DEAREST,
        )
        priced = prices * scale / self.limit
        return height * scale, dict(zip(times, priced.tolist(), strict=True))

    def _find_least_peak(self, until: float, steps: int) -> None:
        """Look for a choice of the least peak, and prove by how much the limit is too small.

        min_x sum_t w_t usage_t(x) over weights w of sum one is at most the peak of any choice; the
        weights of the times with most usage grow.
        """
        weights = dict.fromkeys(self._prices, 1.0)
        for _ in range(steps):
            total = sum(weights.values())
            shares = {at: weight / total for at, weight in weights.items()}
            found, value = self._priced(shares, costs=0.0)
            if found is None:
                return
            self.least_peak = max(self.least_peak, value + self.limit)
            usage = self._offer(found)
            if self.choice or self.least_peak > self.limit or time.perf_counter() > until:
                return
            for at in self._prices:
                now = weights.get(at, total / len(weights))
                weights[at] = now * math.exp(float(usage[at]) / self.limit - 1.0)

    def _offer(self, choice: tuple[int, ...]) -> Floats:
        """Take `choice` if it fits and is the cheapest; else note when it peaks. Return [times]
        bytes."""
        usage: Floats = self.profile.usage(choice).sum(axis=0)
        peak = int(np.argmax(usage))
        if usage[peak] > self.limit:
            self._prices.setdefault(peak, 0.0)
        elif self._cost(choice) < self.objective:
            self.choice, self.objective = choice, self._cost(choice)
        return usage

    def _value(self, choice: tuple[int, ...]) -> float:
        """Return what a choice costs at the present prices: L or more."""
        usage: Floats = self.profile.usage(choice).sum(axis=0)
        paid = sum(price * (float(usage[at]) - self.limit) for at, price in self._prices.items())
        return self._cost(choice) + paid

    def _cost(self, choice: Sequence[int]) -> float:
        return problem_cost(self.problem, choice)

    def _priced(
        self, prices: Mapping[int, float], costs: float = 1.0
    ) -> tuple[tuple[int, ...] | None, float]:
        """Return a minimiser and a lower bound of L, with this multiple of all `costs`."""
        positive = {at: price for at, price in prices.items() if price > 0}
        problem, constant = self._with_prices(positive, costs)
        found = self.solve(problem)
        if found.choice is None or found.lower_bound is None:
            return None, -math.inf
        return found.choice, found.lower_bound + constant

    def _with_prices(
        self, prices: Mapping[int, float], costs: float
    ) -> tuple[ShardingProblem, float]:
        node_cost, edge_cost = (
            np.where(np.isfinite(cost), costs * np.nan_to_num(cost, posinf=0.0), cost)
            for cost in (self.problem.node_cost, self.problem.edge_cost)
        )
        constant = 0.0
        for at, price in prices.items():
            if at not in self._rows:
                self._rows[at] = self.profile.row(at)
            row, fixed = self._rows[at]
            node_cost += price * row
            constant += price * (fixed - self.limit)
        place = edge_places(self.problem)
        times = sorted(prices)
        for copy, start, stop in self.profile.copies_at(times, 0.0):
            price = sum(prices[at] for at in times[start:stop])
            first, second, sizes = copy.first, copy.second, copy.bytes
            if first > second:
                first, second, sizes = second, first, sizes.T
            begin = place[first, second]
            edge_cost[begin : begin + sizes.size] += price * sizes.ravel()
        return evolve(self.problem, node_cost=node_cost, edge_cost=edge_cost), constant


def problem_cost(problem: ShardingProblem, choice: Sequence[int]) -> float:
    """Return the seconds of a choice under `problem`."""
    chosen = np.asarray(choice, dtype=np.int64)
    counts = problem.num_strategies
    nodes = np.concatenate([[0], np.cumsum(counts)])[:-1]
    edges = problem.edges.reshape(-1, 2)
    sizes = counts[edges[:, 0]] * counts[edges[:, 1]]
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    places = starts + chosen[edges[:, 0]] * counts[edges[:, 1]] + chosen[edges[:, 1]]
    return float(problem.node_cost[nodes + chosen].sum() + problem.edge_cost[places].sum())
