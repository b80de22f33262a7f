"""What an operator costs under each of its strategies: compute and the collectives inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alpa_interchange import LogicalMesh, ShardingRule, Strategy
from alpa_meta.bucketed_traffic import own_sums
from alpa_meta.compat import dtype_name
from alpa_meta.layering import tensor_bytes
from alpa_meta.mesh_costs import MeshCosts
from alpa_meta.rules import flops, traffic_bytes

_MATMULS = {"dot_general": "matmul", "ragged_dot_general": "matmul"}


def operator_seconds(
    costs: MeshCosts,
    eqn: Any,
    rule: ShardingRule | None,
    strategies: Sequence[Strategy],
    late: bool,
) -> np.ndarray:
    """Return [strategies] seconds of compute and of completing sums, once.

    `late` sums, which nothing but the update waits for, travel in buckets.
    """
    name = eqn.primitive.name
    work, traffic = flops(eqn), traffic_bytes(eqn)
    kind = _MATMULS.get(name, "convolution" if name.startswith("conv_") else "elementwise")
    dtype = dtype_name(eqn.invars[0].aval.dtype) if eqn.invars else "float32"
    seconds = []
    for strategy in strategies:
        shards = costs.mesh.size(tuple(a for _, axes in strategy.assignment for a in axes))
        cost = costs.compute_seconds(kind, work / shards, traffic / shards, dtype)
        if rule is not None:
            cost += _inner_seconds(costs, eqn, rule, strategy, late)
        seconds.append(cost)
    return np.array(seconds)


def _inner_seconds(
    costs: MeshCosts, eqn: Any, rule: ShardingRule, strategy: Strategy, late: bool
) -> float:
    """Return the seconds of collectives inside an operator, and of sums it completes itself.

    Sums over "add" factors are completed elsewhere for operators with a node of their own.
    """
    mesh, total = costs.mesh, 0.0
    for name, axes in strategy.assignment:
        if rule.factor(name).kind == "permutation":
            total += costs.collective_seconds(
                "collective-permute", _halo_bytes(eqn, rule, strategy, name, mesh), axes
            )
    for sent in own_sums(eqn, rule, strategy, mesh):
        total += costs.collective_seconds(*sent, in_buckets=late)
    return total


def _halo_bytes(
    eqn: Any, rule: ShardingRule, strategy: Strategy, name: str, mesh: LogicalMesh
) -> float:
    """Return the bytes a device exchanges with a neighbour along a permutation factor."""
    factor = rule.factor(name)
    for atom, dims in zip(eqn.invars, rule.operands, strict=True):
        if any(name in dim for dim in dims):
            axes = tuple(a for dim in dims for n in dim for a in strategy.axes(n) if n != name)
            return tensor_bytes(atom) / mesh.size(axes) / factor.size * max(factor.halo, 1)
    return 0.0
