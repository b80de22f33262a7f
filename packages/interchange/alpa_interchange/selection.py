"""Strategy selection: choose one strategy per node at least total cost under a memory limit.

    minimise    sum_i c_i[s_i] + sum_(i,j) r_ij[s_i, s_j]
    subject to  sum_{i live at t} m_i[s_i] <= M        for every time t

Bulk data are flat arrays (offsets and values); an infinite cost forbids a strategy or a pair.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import cmp_using, field, frozen
from attrs.converters import optional

_same = cmp_using(eq=np.array_equal)


def _integers(value: Any) -> np.ndarray:
    return np.ascontiguousarray(value, dtype=np.int64)


def _costs(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return np.ascontiguousarray(array, dtype=np.int64 if array.dtype.kind in "iub" else np.float64)


@frozen(kw_only=True, eq=True)
class ShardingProblem:
    """One strategy-selection problem over `num_nodes` nodes.

    Costs are float64 (seconds; `inf` forbids) or int64; memory is int64 or float64 (bytes). Edge
    cost tables are row-major `[strategies of the first node, strategies of the second]`; parallel
    edges and self-edges (diagonal used) are allowed. A node holds memory at times
    `live[i, 0] <= t < live[i, 1]`; an empty interval holds none. `axis_bits` has a bit for each
    mesh axis that a strategy shards over: solvers look for choices that use few of them, too.
    """

    name: str = ""
    num_strategies: np.ndarray = field(converter=_integers, eq=_same)  # [nodes]
    node_cost: np.ndarray = field(converter=_costs, eq=_same)  # [sum of num_strategies]
    node_memory: np.ndarray = field(converter=_costs, eq=_same)  # [sum of num_strategies]
    live: np.ndarray = field(converter=_integers, eq=_same)  # [nodes, 2], half-open
    edges: np.ndarray = field(converter=_integers, eq=_same)  # [edges, 2]
    edge_cost: np.ndarray = field(converter=_costs, eq=_same)  # [sum over edges of |s_i| |s_j|]
    axis_bits: np.ndarray | None = field(  # [sum of num_strategies]; None: not known
        default=None, converter=optional(_integers), eq=_same
    )
    memory_limit: float | None = None  # bytes; None: unlimited
    node_names: tuple[str, ...] = ()
    strategy_names: tuple[tuple[str, ...], ...] = ()

    def __attrs_post_init__(self) -> None:
        count = self.num_strategies
        if count.ndim != 1 or (count < 1).any():
            raise ValueError(
                "ShardingProblem.num_strategies: every node needs at least one strategy"
            )
        total = int(count.sum())
        for name in ("node_cost", "node_memory", "axis_bits"):
            values = getattr(self, name)
            if values is None:
                continue
            if values.shape != (total,):
                raise ValueError(
                    f"ShardingProblem.{name} must have {total} entries (one per strategy of each "
                    f"node), got shape {values.shape}"
                )
            if values.dtype.kind == "f" and np.isnan(values).any():
                raise ValueError(f"ShardingProblem.{name} must not hold NaN")
        if (self.node_memory < 0).any():
            raise ValueError("ShardingProblem.node_memory must not be negative")
        if self.live.reshape(-1, 2).shape[0] != len(count):
            raise ValueError(
                f"ShardingProblem.live must be [{len(count)}, 2], got {self.live.shape}"
            )
        edges = self.edges.reshape(-1, 2)
        if len(edges) and (edges.min() < 0 or edges.max() >= len(count)):
            raise ValueError(f"ShardingProblem.edges must name nodes 0..{len(count) - 1}")
        entries = int((count[edges[:, 0]] * count[edges[:, 1]]).sum()) if len(edges) else 0
        if self.edge_cost.shape != (entries,):
            raise ValueError(
                f"ShardingProblem.edge_cost must have {entries} entries, got {self.edge_cost.shape}"
            )
        if self.edge_cost.dtype.kind == "f" and np.isnan(self.edge_cost).any():
            raise ValueError("ShardingProblem.edge_cost must not hold NaN")

    @property
    def num_nodes(self) -> int:
        return len(self.num_strategies)

    @property
    def num_edges(self) -> int:
        return len(self.edges.reshape(-1, 2))


@frozen(kw_only=True)
class ShardingSolution:
    """The answer to a `ShardingProblem`.

    `lower_bound` is proven: no choice costs less. `gap` is (objective - lower_bound) /
    |lower_bound|. `status` is "optimal", "feasible" (an answer, optimality not proven),
    "infeasible" (proven; then `smallest_memory` is the least limit with an answer, if known) or
    "timed_out" (no answer found).
    """

    choice: tuple[int, ...] | None
    objective: float | None
    lower_bound: float | None
    status: str
    seconds: float
    smallest_memory: float | None = None
    solver: str = ""

    @property
    def gap(self) -> float | None:
        """Return the relative distance of objective and bound, 0 when proved optimal."""
        if self.objective is None or self.lower_bound is None:
            return None
        if self.objective <= self.lower_bound:
            return 0.0
        return (self.objective - self.lower_bound) / max(abs(self.lower_bound), 1e-300)
