"""The state that every part of one solve shares: best choice, proven bound, and when to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from attrs import define, field

from ilp_sharding.problem.instance import Instance

_HUNG_SECONDS = 120.0  # of HiGHS on a program that should take it a few


@define
class Search:
    """The state of one solve: best original choice, its cost, the bound, and when to stop.

    `until` is a `time.perf_counter()` value; `report(phase)` is called after every improvement.
    `programs` says whether integer programs may be solved, whose time nobody can foresee, and
    `max_nodes` how far their trees may grow where work is counted instead of seconds.
    `narrowed_entries` is the size of the tables in which messages alone settled nothing, `branched`
    whether branching on what they left settled nothing either. `bound_only`: no better choice is
    wanted than raises the bound.
    """

    instance: Instance
    until: float
    choice: np.ndarray | None = None
    objective: float = math.inf
    lower_bound: float = -math.inf
    smallest_memory: float | None = None
    infeasible: bool = False
    gap_tolerance: float = 0.0
    seed: int = 0
    programs: bool = True
    max_nodes: int | None = None
    narrowed_entries: float = math.inf
    branched: bool = False
    bound_only: bool = False
    report: Callable[[str], None] = field(default=lambda phase: None)

    def offer(self, choice: np.ndarray, phase: str) -> None:
        """Take `choice` (which keeps the memory limit) if it is the cheapest so far."""
        objective = self.instance.objective(choice)
        if objective < self.objective:
            self.choice, self.objective = choice, objective
            self.report(phase)

    def raise_bound(self, bound: float, phase: str) -> None:
        """Record the proven bound `bound`; of integer costs it is rounded up."""
        if self.instance.integral and math.isfinite(bound):
            bound = math.ceil(bound - 1e-6 * max(1.0, abs(bound) * 1e-9))
        bound = min(bound, self.objective)
        if bound > self.lower_bound:
            self.lower_bound = bound
            self.report(phase)

    @property
    def closed(self) -> bool:
        """Whether the best choice is proved optimal (to rounding), or within the gap tolerance."""
        return self.choice is not None and self.closes(self.objective, self.lower_bound)

    @property
    def proved(self) -> bool:
        """Whether the best choice is proved optimal, to rounding."""
        slack = 1e-11 * abs(self.objective)
        return self.choice is not None and self.objective - self.lower_bound <= slack

    def closes(self, objective: float, bound: float) -> bool:
        """Return whether a choice of this cost needs no higher bound, to the gap tolerance."""
        return objective - bound <= 1e-11 * abs(objective) + self.gap_tolerance * abs(bound)

    def cutoff(self) -> float:
        """Return the cost from which on a choice is of no interest."""
        if not math.isfinite(self.objective):
            return math.inf
        if self.instance.integral:
            return self.objective - 1 + 1e-6
        return self.objective + 1e-12 * abs(self.objective)

    @property
    def until_hung(self) -> float:
        """When a run of HiGHS ends: where nodes are counted, only if it hangs (`highs_run`)."""
        if self.max_nodes is None:
            return self.until
        return min(self.until, time.perf_counter() + _HUNG_SECONDS)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.until

    @property
    def seconds(self) -> float:
        """The time left."""
        return self.until - time.perf_counter()
