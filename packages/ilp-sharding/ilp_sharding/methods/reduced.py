"""A reduced problem, as the methods are asked about it: its size, its memory rows, its search."""

from __future__ import annotations

import math

import numpy as np
from attrs import define, field

from ilp_sharding.choice.first_choice import greedy_start
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exact.integer_program import smallest_peak
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.problem.instance import Instance
from ilp_sharding.problem.memory_rows import (
    DENSE_USAGE,
    MemoryProfile,
    binding_rows,
    exact_memory,
)
from ilp_sharding.problem.reduction import Network
from ilp_sharding.search import Search
from ilp_sharding.workers.pool import WorkerPool

LARGE_NODES = 5000  # from here on, or from
LARGE_TABLES = 2e7  # table entries on, workers start while the problem is still being reduced
_PEAK_SECONDS = 2e-5  # per row of a table, to hand the smallest peak to HiGHS


@define(eq=False)
class Reduced:
    """What is left of one problem, and what it takes to go on with it.

    `memory` is None without a limit, `elimination` covers the open nodes as far as its work limit
    let it. `entries` of the tables and `usage` [times x strategies] are counted before any method
    ran. `rounds` are those of the caller's options. `has_start`: a first choice was looked for.
    """

    instance: Instance
    network: Network
    search: Search
    memory: MemoryProfile | None
    elimination: Elimination
    workers: WorkerPool
    rounds: int | None
    has_start: bool
    entries: int = field(init=False)
    usage: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.entries = self.network.num_entries()
        self.usage = 0.0 if self.memory is None else self.memory.dense_size

    @property
    def large(self) -> bool:
        return is_large(self.instance)

    def find_start(self) -> None:
        """Look for a first choice, unless that was done."""
        if not self.has_start:
            self.has_start = True
            offer_start(self.instance, self.search, self.search.until)

    def read_memory(self) -> None:
        """Make the memory rows anew, after strategies were dropped."""
        if self.memory is not None:
            self.memory = MemoryProfile(self.instance, self.network)

    def find_smallest_memory(self) -> None:
        """Find the least limit with an answer, if there is none and time is left."""
        if not self.search.infeasible or self.memory is None or self.search.late:
            return
        if self.memory.dense_size < DENSE_USAGE:
            usage, slack = binding_rows(self.memory)
            prove_infeasible(self.network, self.search, self.network.open_nodes(), usage, slack)


def is_large(instance: Instance) -> bool:
    """Return whether the problem is one for worker processes from the start."""
    return instance.num_nodes > LARGE_NODES or len(instance.table) > LARGE_TABLES


def offer_start(instance: Instance, search: Search, until: float) -> None:
    """Offer the choice and bound of a pass over the nodes."""
    start, bound, impossible = greedy_start(instance, until)
    search.infeasible = impossible and exact_memory(instance)
    if bound == math.inf:
        raise NoAssignment
    if start is not None:
        search.offer(start, "start")
    search.raise_bound(bound, "start")


def prove_infeasible(
    network: Network, search: Search, nodes: list[int], usage: np.ndarray, slack: np.ndarray
) -> None:
    """Record that no choice fits and, if time allows, the smallest limit that has an answer."""
    search.infeasible = True
    rows = sum(len(table) for node in nodes for table in network.tables[node].values())
    if _PEAK_SECONDS * (rows + len(slack)) > search.seconds:
        return
    _, excess, proved = smallest_peak(
        network, nodes, usage, slack, search.until_hung, search.max_nodes
    )
    if proved:
        search.smallest_memory = search.instance.limit + excess
