"""Builds a `ShardingProblem` piece by piece; equal pieces fold into one node.

Operators of identical layers are given the same key: they become one node (one choice for all of
them) whose costs and memory add up, and so do their edges. The problem of a stage with 48 equal
layers is then as small as that of a stage with one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from attrs import define, field

from alpa_interchange import ShardingProblem


@define
class _Node:
    name: str
    strategies: tuple[str, ...]
    cost: np.ndarray
    memory: np.ndarray
    axis_bits: np.ndarray


@define
class ProblemBuilder:
    """Accumulates nodes, costs, memory and edges by key."""

    _nodes: list[_Node] = field(factory=list)
    _number: dict[Hashable, int] = field(factory=dict)
    _edges: dict[tuple[int, int], np.ndarray] = field(factory=dict)

    def node(
        self,
        key: Hashable,
        name: str,
        strategies: Sequence[str],
        axis_bits: np.ndarray | None = None,
    ) -> int:
        """Return the number of the node with `key`, made on first use with these strategies, which
        use the mesh axes of `axis_bits` [strategies] (None: none)."""
        if key not in self._number:
            self._number[key] = len(self._nodes)
            zeros = np.zeros(len(strategies))
            bits = zeros.astype(np.int64) if axis_bits is None else axis_bits
            self._nodes.append(_Node(name, tuple(strategies), zeros, zeros.copy(), bits))
        number = self._number[key]
        if len(self._nodes[number].strategies) != len(strategies):
            raise ValueError(
                f"node {name!r} is given with {len(strategies)} strategies, but the node of the "
                f"same key has {len(self._nodes[number].strategies)}"
            )
        return number

    def add_cost(self, node: int, cost: np.ndarray) -> None:
        """Add `cost` [strategies], seconds, to a node."""
        self._nodes[node].cost += cost

    def add_memory(self, node: int, memory: np.ndarray) -> None:
        """Add `memory` [strategies], bytes per device, to a node."""
        self._nodes[node].memory += memory

    def add_edge(self, first: int, second: int, cost: np.ndarray) -> None:
        """Add `cost` [strategies of first, strategies of second], seconds, between two nodes."""
        if first > second:
            first, second, cost = second, first, cost.T
        if first == second:
            self.add_cost(first, np.ascontiguousarray(np.diagonal(cost)))
        elif (first, second) in self._edges:
            self._edges[first, second] = self._edges[first, second] + cost
        else:
            self._edges[first, second] = cost

    def axis_bits(self) -> list[np.ndarray]:
        """Return, by node, the mesh axes that its strategies use."""
        return [node.axis_bits for node in self._nodes]

    def build(self, name: str, memory_limit: float | None = None) -> ShardingProblem:
        """Return the problem so far; memory of all nodes counts at the same time."""
        count = len(self._nodes)
        pairs = list(self._edges)
        return ShardingProblem(
            name=name,
            num_strategies=np.array([len(node.strategies) for node in self._nodes], dtype=np.int64),
            node_cost=_joined([node.cost for node in self._nodes]),
            node_memory=_joined([node.memory for node in self._nodes]),
            live=np.tile(np.array([[0, 1]], dtype=np.int64), (count, 1)),
            edges=np.array(pairs, dtype=np.int64).reshape(-1, 2),
            edge_cost=_joined([self._edges[pair].ravel() for pair in pairs]),
            axis_bits=_joined(self.axis_bits()),
            memory_limit=memory_limit,
            node_names=tuple(node.name for node in self._nodes),
            strategy_names=tuple(node.strategies for node in self._nodes),
        )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)
