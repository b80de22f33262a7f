"""What a choice costs and how much memory it uses, computed straight from the problem.

Shares no code with the solver, so it can judge the solver's answers. Integer costs are added as
Python integers, which cannot overflow; float costs with `math.fsum`. Memory is added up one node
and one time at a time over the interval ends.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from alpa_interchange.selection import ShardingProblem


@frozen(kw_only=True)
class Evaluation:
    """The cost and peak memory of one choice; `fits` says whether the limit holds at all times."""

    cost: int | float
    peak_memory: int | float
    peak_time: int | None
    memory_limit: float | None
    fits: bool
    forbidden: int

    @property
    def feasible(self) -> bool:
        """Whether the choice keeps the memory limit and uses nothing of infinite cost."""
        return self.fits and self.forbidden == 0


def check(problem: ShardingProblem, choice: Sequence[int]) -> Evaluation:
    """Return the evaluation of `choice` [nodes]; ValueError if it does not fit the nodes."""
    strategies = np.array(_validated(problem, choice), dtype=np.int64)
    sizes = problem.num_strategies
    chosen = np.cumsum(sizes) - sizes + strategies
    edges = problem.edges.reshape(-1, 2)
    first, second = edges[:, 0], edges[:, 1]
    entries = sizes[first] * sizes[second]
    pairs = np.cumsum(entries) - entries + strategies[first] * sizes[second] + strategies[second]
    terms: list[Any] = problem.node_cost[chosen].tolist() + problem.edge_cost[pairs].tolist()
    forbidden = terms.count(math.inf)
    cost = math.inf if forbidden else _total(terms)
    changes: dict[int, list[Any]] = {}
    memory, live = problem.node_memory[chosen], problem.live.reshape(-1, 2)
    held = (live[:, 0] < live[:, 1]) & (memory != 0)
    for (start, stop), used in zip(live[held].tolist(), memory[held].tolist(), strict=True):
        changes.setdefault(start, []).append(used)
        changes.setdefault(stop, []).append(-used)
    peak, peak_time = _peak(changes)
    limit = problem.memory_limit
    fits = limit is None or peak <= limit or _equal_to_rounding(peak, limit)
    return Evaluation(
        cost=cost,
        peak_memory=peak,
        peak_time=peak_time,
        memory_limit=limit,
        fits=fits,
        forbidden=forbidden,
    )


def _validated(problem: ShardingProblem, choice: Sequence[int]) -> list[int]:
    strategies = list(map(int, choice))
    if strategies != list(choice):
        raise ValueError("a choice must hold whole numbers, one strategy per node")
    if len(strategies) != problem.num_nodes:
        raise ValueError(
            f"a choice needs one strategy for each of the {problem.num_nodes} nodes, "
            f"got {len(strategies)}"
        )
    sizes = problem.num_strategies.tolist()
    if min(strategies, default=0) < 0 or not all(map(operator.lt, strategies, sizes)):
        i = next(i for i, s in enumerate(strategies) if not 0 <= s < sizes[i])
        raise ValueError(
            f"node {i} has strategies 0..{sizes[i] - 1}, the choice says {strategies[i]}"
        )
    return strategies


def _total(terms: list[Any]) -> int | float:
    kinds = set(map(type, terms))
    if kinds == {float}:
        return math.fsum(terms)
    if float not in kinds:
        return int(sum(terms))
    integers = sum(term for term in terms if isinstance(term, int))
    return math.fsum([float(integers), *(term for term in terms if not isinstance(term, int))])


def _peak(changes: dict[int, list[Any]]) -> tuple[int | float, int | None]:
    """Return the largest running sum over time and when it is first reached."""
    peak: int | float = 0
    peak_time = None
    current: int | float = 0
    for time in sorted(changes):
        current = _total([current, *changes[time]])
        if current > peak:
            peak, peak_time = current, time
    return peak, peak_time


def _equal_to_rounding(peak: float, limit: float) -> bool:
    return isinstance(peak, float) and peak <= limit * (1 + 1e-9)
