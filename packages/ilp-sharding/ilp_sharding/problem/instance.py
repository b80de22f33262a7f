"""A problem as the solver sees it: flat float64 arrays, pins applied, forbidden entries infinite.

Integer costs of 10^18 and more are how the contest writes "forbidden". Adding them up would destroy
the precision of everything else, so they are made infinite, with a guard that keeps the proof
exact:

    huge_floor = sum of the least entry of every table
                 + min over huge entries (entry - least entry of its table)

No choice that uses a huge entry costs less than `huge_floor`, so an optimum of the problem without
them is an optimum of the problem with them as long as it costs at most `huge_floor`
-> implemented in Instance.of(); checked by solve().
"""

from __future__ import annotations

import math

import numpy as np
from attrs import evolve, frozen

from alpa_interchange.selection import ShardingProblem
from ilp_sharding.options import SolveOptions

HUGE = 1e18  # the contest's mark of a forbidden pair
_BLOCK = 1 << 16


@frozen(kw_only=True, eq=False)
class Instance:
    """Flat arrays of one problem; `offset` and `table_offset` delimit nodes and edges.

    `cost` [strategies], `memory` [strategies], `start`, `stop` [nodes] half-open, `edges` [edges,
    2], `table` [entries] row-major; `limit` bytes or inf. `integral`: every finite cost is an
    integer and no sum of them leaves the exact range of float64. `memory_integral`: likewise for
    memory. `axis_bits`: as in `ShardingProblem`.
    """

    offset: np.ndarray
    cost: np.ndarray
    memory: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    edges: np.ndarray
    table_offset: np.ndarray
    table: np.ndarray
    limit: float
    integral: bool
    huge_floor: float
    axis_bits: np.ndarray | None = None

    @classmethod
    def of(
        cls, problem: ShardingProblem, options: SolveOptions, *, forbid_huge: bool = True
    ) -> Instance:
        """Return the arrays of `problem` under the pins and forbidden strategies of `options`."""
        count = problem.num_strategies
        edges = problem.edges.reshape(-1, 2)
        offset = np.concatenate([[0], np.cumsum(count)])
        table_offset = np.concatenate([[0], np.cumsum(count[edges[:, 0]] * count[edges[:, 1]])])
        cost = problem.node_cost.astype(np.float64)
        table = problem.edge_cost.astype(np.float64, copy=False)
        _apply_pins(cost, offset, options)
        live = problem.live.reshape(-1, 2)
        limit = math.inf if problem.memory_limit is None else float(problem.memory_limit)
        floor = math.inf
        if forbid_huge:
            owned = not np.may_share_memory(table, problem.edge_cost)
            cost, table, floor = _without_huge(cost, offset, table, table_offset, owned)
        return cls(
            offset=offset,
            cost=cost,
            memory=problem.node_memory.astype(np.float64),
            start=live[:, 0],
            stop=live[:, 1],
            edges=edges,
            table_offset=table_offset,
            table=table,
            limit=limit,
            integral=_exact_integers(cost, table, len(count) + len(edges)),
            huge_floor=floor,
            axis_bits=problem.axis_bits,
        )

    @property
    def num_nodes(self) -> int:
        return len(self.offset) - 1

    def without(self, bound: float) -> Instance:
        """Return the instance with every entry forbidden that no choice costing <= `bound` can use.

        An entry can be used only if its excess over the least entry of its table is at most the
        excess of `bound` over the sum of all least entries.
        """
        least_node = group_minimum(self.cost, self.offset)
        least_edge = group_minimum(self.table, self.table_offset)
        total = math.fsum(least_node) + math.fsum(least_edge)
        room = bound - total
        room += 1e-9 * max(abs(bound), abs(total), 1e-300)
        if not math.isfinite(room):
            return self
        cost = _cut(self.cost, least_node, self.offset, room)
        table = _cut(self.table, least_edge, self.table_offset, room)
        if cost is self.cost and table is self.table:
            return self
        return evolve(self, cost=cost, table=table)

    def objective(self, choice: np.ndarray) -> float:
        """Return the cost of `choice` [nodes], inf if it uses a forbidden entry."""
        count = np.diff(self.offset)
        first, second = self.edges[:, 0], self.edges[:, 1]
        nodes = self.cost[self.offset[:-1] + choice]
        pairs = self.table[self.table_offset[:-1] + choice[first] * count[second] + choice[second]]
        if np.isposinf(nodes).any() or np.isposinf(pairs).any():
            return math.inf
        return math.fsum(nodes) + math.fsum(pairs)


def group_minimum(values: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the least value of every group `values[offset[g]:offset[g + 1]]`, groups non-empty."""
    return np.minimum.reduceat(values, offset[:-1]) if len(offset) > 1 else np.zeros(0)


def _cut(values: np.ndarray, least: np.ndarray, offset: np.ndarray, room: float) -> np.ndarray:
    """Return `values` with what exceeds the `least` of its group by more than `room` infinite."""
    if len(offset) < 2:
        return values
    largest = np.maximum.reduceat(values, offset[:-1])
    groups = np.flatnonzero(largest > least + room)
    cut = values
    for start, stop, most in zip(
        offset[groups].tolist(),
        offset[groups + 1].tolist(),
        (least[groups] + room).tolist(),
        strict=True,
    ):
        part = values[start:stop]
        beyond = (part > most) & (part < np.inf)
        if beyond.any():
            if cut is values:
                cut = values.copy()
            cut[start:stop][beyond] = np.inf
    return cut


def _apply_pins(cost: np.ndarray, offset: np.ndarray, options: SolveOptions) -> None:
    for node, strategy in [*options.pins.items(), *options.forbid]:
        if not 0 <= node < len(offset) - 1:
            raise ValueError(f"pinned or forbidden node {node} is not in 0..{len(offset) - 2}")
        if not 0 <= strategy < offset[node + 1] - offset[node]:
            raise ValueError(
                f"node {node} has strategies 0..{offset[node + 1] - offset[node] - 1}; "
                f"strategy {strategy} cannot be pinned or forbidden"
            )
    for node, strategy in options.pins.items():
        kept = cost[offset[node] + strategy]
        cost[offset[node] : offset[node + 1]] = np.inf
        cost[offset[node] + strategy] = kept
    for node, strategy in options.forbid:
        cost[offset[node] + strategy] = np.inf


def _without_huge(
    cost: np.ndarray,
    offset: np.ndarray,
    table: np.ndarray,
    table_offset: np.ndarray,
    owned: bool,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (cost, table, `huge_floor` of above) with entries of at least HUGE infinite.

    A `table` that is `owned` is changed in place.
    """
    total, least_excess = 0.0, math.inf
    kept = []
    for values, bounds in ((cost, offset), (table, table_offset)):
        if len(bounds) > 1:
            least = group_minimum(values, bounds)
            total += math.fsum(least[np.isfinite(least)])
            over = (values >= HUGE) & (values < np.inf)
            if over.any():
                huge = group_minimum(np.where(over, values, np.inf), bounds)
                with_huge = huge < np.inf
                excess = huge[with_huge] - least[with_huge]
                least_excess = min(least_excess, float(excess.min()))
                values = values if owned else values.copy()
                values[over] = np.inf
        kept.append(values)
    if math.isinf(least_excess):
        return kept[0], kept[1], math.inf
    floor = total + least_excess
    return kept[0], kept[1], floor - 1e-12 * (abs(total) + least_excess)


def _exact_integers(cost: np.ndarray, table: np.ndarray, num_terms: int) -> bool:
    largest = 0.0
    for values in (cost, table):
        for start in range(0, len(values), _BLOCK):  # a fraction is found early, if there is one
            part = values[start : start + _BLOCK]
            finite = part[part < np.inf]
            if (finite != np.floor(finite)).any():
                return False
            if len(finite):
                largest = max(largest, float(finite.max()), -float(finite.min()))
    return largest * max(num_terms, 1) < 2.0**52
