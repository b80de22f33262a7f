"""What an operator costs under each of its strategies: compute and the collectives inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from alpa_interchange import LogicalMesh, ShardingRule, Strategy
from alpa_meta.compat import JaxprEqn
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.arithmetic import arithmetic
from alpa_meta.intra_op.bucketed_traffic import Sent, own_sums
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.operators import flops, kernel_kind, operator_of, sharding_rule, traffic_bytes


def operator_seconds(
    costs: MeshCosts,
    eqn: JaxprEqn,
    rule: ShardingRule | None,
    strategies: Sequence[Strategy],
    late: bool,
    together: int = 1,
) -> np.ndarray:
    """Return [strategies] seconds of compute and of completing sums, once.

    `late` sums, which nothing but the update waits for, travel in buckets; others with those of
    `together` equations.
    """
    work, traffic, kind = flops(eqn), traffic_bytes(eqn), kernel_kind(eqn)
    patch_bytes = operator_of(eqn).patch_bytes if costs.platform == "cpu" else None
    dtype, passes = arithmetic(eqn, costs.platform)
    seconds = []
    for strategy in strategies:
        shards = costs.mesh.size(tuple(a for _, axes in strategy.assignment for a in axes))
        moved = traffic / shards
        if patch_bytes is not None and rule is not None:
            moved += patch_bytes(eqn, rule, strategy, costs.mesh)
        cost = costs.compute_seconds(kind, passes * work / shards, moved, dtype)
        if rule is not None:
            cost += _inner_seconds(costs, eqn, rule, strategy, late, together)
        seconds.append(cost)
    return np.array(seconds)


def _inner_seconds(
    costs: MeshCosts,
    eqn: JaxprEqn,
    rule: ShardingRule,
    strategy: Strategy,
    late: bool,
    together: int,
) -> float:
    """Return the seconds of collectives inside an operator, and of sums it completes itself.

    Sums over "add" factors are completed elsewhere for operators with a node of their own.
    """
    mesh, total = costs.mesh, 0.0
    exchanges = operator_of(eqn).exchanges or _halos
    if any(rule.factor(name).kind == "permutation" for name, _ in strategy.assignment):
        for sent in exchanges(eqn, strategy, mesh):
            total += costs.collective_seconds(*sent)
    for kind, size, axes in own_sums(eqn, rule, strategy, mesh):
        if late:
            total += costs.collective_seconds(kind, size, axes, in_buckets=True)
        else:
            total += costs.collective_seconds(kind, size * together, axes) / together
    return total


def _halos(eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> Iterator[Sent]:
    """Yield the exchange with a neighbour along each sharded permutation factor."""
    rule = sharding_rule(eqn)
    assert rule is not None
    for name, axes in strategy.assignment:
        if rule.factor(name).kind == "permutation":
            yield "collective-permute", _halo_bytes(eqn, rule, strategy, name, mesh), axes


def _halo_bytes(
    eqn: JaxprEqn, rule: ShardingRule, strategy: Strategy, name: str, mesh: LogicalMesh
) -> float:
    """Return the bytes a device exchanges with a neighbour along a permutation factor."""
    factor = rule.factor(name)
    for atom, dims in zip(eqn.invars, rule.operands, strict=True):
        if any(name in dim for dim in dims):
            axes = tuple(a for dim in dims for n in dim for a in strategy.axes(n) if n != name)
            return tensor_bytes(atom) / mesh.size(axes) / factor.size * max(factor.halo, 1)
    return 0.0
