"""What an operator costs under each of its strategies: compute and the collectives inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from alpa_interchange import LogicalMesh, ShardingRule, Strategy
from alpa_meta.compat import dtype_name
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.bucketed_traffic import Sent, own_sums
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.operators import flops, operator_of, sharding_rule, traffic_bytes

_CACHE_LINE = 64.0  # bytes
_MATMULS = {"dot_general": "matmul", "ragged_dot_general": "matmul"}


def operator_seconds(
    costs: MeshCosts,
    eqn: Any,
    rule: ShardingRule | None,
    strategies: Sequence[Strategy],
    late: bool,
    together: int = 1,
) -> np.ndarray:
    """Return [strategies] seconds of compute and of completing sums, once.

    `late` sums, which nothing but the update waits for, travel in buckets; others with those of
    `together` equations.
    """
    name = eqn.primitive.name
    work, traffic = flops(eqn), traffic_bytes(eqn)
    patched = name == "conv_general_dilated" and rule is not None and costs.on_cpu
    kind = _MATMULS.get(name, "convolution" if name.startswith("conv_") else "elementwise")
    dtype = dtype_name(eqn.invars[0].aval.dtype) if eqn.invars else "float32"
    seconds = []
    for strategy in strategies:
        shards = costs.mesh.size(tuple(a for _, axes in strategy.assignment for a in axes))
        moved = traffic / shards
        if patched:
            assert rule is not None
            moved += _patch_bytes(eqn, work, rule, strategy, costs.mesh)
        cost = costs.compute_seconds(kind, work / shards, moved, dtype)
        if rule is not None:
            cost += _inner_seconds(costs, eqn, rule, strategy, late, together)
        seconds.append(cost)
    return np.array(seconds)


def _patch_bytes(
    eqn: Any, work: float, rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh
) -> float:
    """Return the bytes of the patches that a device's part of a convolution takes on a CPU.

    XLA's CPU backend multiplies a matrix [result positions, window x input channels] of patches,
    copied in runs of input channels, by one of weights. It is as large however few the output
    channels are, and a run takes no less time than a cache line: measured 7.5 ns for 1 to 32
    float32 channels on one core, jax 0.10.2. Runs of a grouped convolution take half of that once a
    device has 32 groups (3.5 to 5 ns, with fewer 7 to 10).
    """
    params, right = eqn.params, eqn.invars[1].aval
    out_place, in_place = params["dimension_numbers"].rhs_spec[:2]
    groups = params["feature_group_count"] * params["batch_group_count"]
    runs = work / 2 / max(right.shape[out_place] // groups, 1) / max(right.shape[in_place], 1)
    contracted = set(rule.operands[1][in_place])
    positions = {name for dim in rule.operands[0] for name in dim} - contracted
    channels = right.shape[in_place] / mesh.size(_axes_of(contracted, strategy))
    run_bytes = max(channels * right.dtype.itemsize, _CACHE_LINE)
    if groups / mesh.size(_axes_of(positions & set(rule.operands[1][out_place]), strategy)) >= 32:
        run_bytes /= 2
    return float(runs / mesh.size(_axes_of(positions, strategy)) * run_bytes)


def _axes_of(names: set[str], strategy: Strategy) -> tuple[str, ...]:
    return tuple(a for name, axes in strategy.assignment if name in names for a in axes)


def _inner_seconds(
    costs: MeshCosts,
    eqn: Any,
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


def _halos(eqn: Any, strategy: Strategy, mesh: LogicalMesh) -> Iterator[Sent]:
    """Yield the exchange with a neighbour along each sharded permutation factor."""
    rule = sharding_rule(eqn)
    assert rule is not None
    for name, axes in strategy.assignment:
        if rule.factor(name).kind == "permutation":
            yield "collective-permute", _halo_bytes(eqn, rule, strategy, name, mesh), axes


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
