"""What a problem looks like before and after exact reduction, for `ilp-sharding stats`."""

from __future__ import annotations

import math

import numpy as np
from attrs import frozen

from alpa_interchange.selection import ShardingProblem
from ilp_sharding.exact.elimination import Elimination
from ilp_sharding.exceptions import NoAssignment
from ilp_sharding.options import SolveOptions
from ilp_sharding.problem.instance import Instance, group_minimum
from ilp_sharding.problem.memory_rows import MemoryProfile, group_maximum
from ilp_sharding.problem.reduction import Network


@frozen(kw_only=True)
class Statistics:
    """Sizes of one problem, [as given, after reduction].

    `width`: nodes in the largest table of the greedy elimination order, less one (None if its
    tables pass 10^18 entries); `work`: entries of all its tables. `binding_times` of `times`: where
    the largest usages together exceed the limit; `least_load`, `largest_load`: worst time's usage
    over the limit when every node uses its least, its most.
    """

    name: str
    feasible: bool
    nodes: tuple[int, int]
    strategies: tuple[int, int]
    edges: tuple[int, int]
    entries: tuple[int, int]
    components: tuple[int, int]
    largest_component: tuple[int, int]
    width: int | None
    work: float
    times: tuple[int, int]
    binding_times: int | None
    least_load: float | None
    largest_load: float | None

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (label, as given, after reduction) lines for people."""
        pairs = [
            ("nodes", self.nodes),
            ("strategies", self.strategies),
            ("edges", self.edges),
            ("table entries", self.entries),
            ("components", self.components),
            ("largest component", self.largest_component),
            ("times (ends; possible peaks)", self.times),
        ]
        lines = [(label, f"{a:,}", f"{b:,}") for label, (a, b) in pairs]
        width = "over 10^18 entries" if self.width is None else str(self.width)
        lines.append(("elimination width", "", width))
        lines.append(("elimination work", "", f"{self.work:.3g}"))
        if self.binding_times is not None:
            lines.append(("times memory can bind", "", f"{self.binding_times:,}"))
            lines.append(("least usage / limit", "", f"{self.least_load:.3g}"))
            lines.append(("largest usage / limit", "", f"{self.largest_load:.3g}"))
        if not self.feasible:
            lines.append(("forbidden entries", "", "leave no choice"))
        return lines


def problem_statistics(problem: ShardingProblem) -> Statistics:
    """Return the statistics of `problem`."""
    instance = Instance.of(problem, SolveOptions())
    before = Network(instance)
    every = list(range(before.num_nodes))
    parts = before.components(every)
    network = Network(instance)
    feasible = True
    try:
        network.reduce()
    except NoAssignment:
        feasible = False
    nodes = network.open_nodes() if feasible else []
    left = network.components(nodes)
    sizes = {i: len(network.cost[i]) for i in nodes}
    elimination = Elimination(nodes, sizes, network.tables, 1e18, plan_only=True)
    live = instance.start < instance.stop
    ends = len(np.unique(np.concatenate([instance.start[live], instance.stop[live]])))
    memory = MemoryProfile(instance, network) if feasible else None
    binding, least, largest = _load(instance, memory)
    return Statistics(
        name=problem.name,
        feasible=feasible,
        nodes=(problem.num_nodes, len(nodes)),
        strategies=(int(problem.num_strategies.sum()), sum(sizes.values())),
        edges=(problem.num_edges, sum(len(network.tables[i]) for i in nodes) // 2),
        entries=(
            len(problem.edge_cost),
            sum(t.size for i in nodes for t in network.tables[i].values()) // 2,
        ),
        components=(len(parts), len(left)),
        largest_component=(max(map(len, parts), default=0), max(map(len, left), default=0)),
        width=max(map(len, elimination.scopes), default=0) if elimination.complete else None,
        work=elimination.work,
        times=(ends, 0 if memory is None else memory.num_times),
        binding_times=binding,
        least_load=least,
        largest_load=largest,
    )


def _load(
    instance: Instance, memory: MemoryProfile | None
) -> tuple[int | None, float | None, float | None]:
    """Return (binding times, least load, largest load), None without a finite limit."""
    if memory is None or not math.isfinite(instance.limit) or instance.limit <= 0:
        return None, None, None
    loads = []
    live = instance.start < instance.stop
    for reduce in (group_minimum, group_maximum):
        usage = reduce(instance.memory, instance.offset)
        changes = np.zeros(memory.num_times + 1)
        begin = np.searchsorted(memory.times, instance.start[live])
        end = np.searchsorted(memory.times, instance.stop[live])
        np.add.at(changes, begin, usage[live])
        np.add.at(changes, end, -usage[live])
        loads.append(np.cumsum(changes)[: memory.num_times])
    binding = int((loads[1] > instance.limit).sum())
    worst = [float(load.max(initial=0.0)) / instance.limit for load in loads]
    return binding, worst[0], worst[1]
