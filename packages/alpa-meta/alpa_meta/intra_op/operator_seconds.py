"""What an operator costs under each of its strategies: compute and the collectives inside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from alpa_interchange import LogicalMesh, ShardingRule, Strategy
from alpa_meta.compat import JaxprEqn, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.arithmetic import arithmetic
from alpa_meta.intra_op.bucketed_traffic import Sent, own_sums
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.operators import (
    flops,
    kernel_kind,
    operator_of,
    operator_signature,
)
from alpa_meta.operators.contraction import product_dims
from alpa_meta.operators.operator import ExchangeFunction
from alpa_meta.program_caches import cached_by_program
from alpa_meta.types import Floats


def operator_seconds(
    costs: MeshCosts,
    eqn: JaxprEqn,
    rule: ShardingRule | None,
    strategies: tuple[Strategy, ...],
    late: bool,
    moved: float,
    together: int = 1,
) -> Floats:
    """Return [strategies] seconds of compute and of completing sums, once; remembered.

    `moved` are the bytes of the whole operator through memory (`fused_traffic`).
    `late` sums, which nothing but the update waits for, travel in buckets; others with those of
    `together` equations.
    """
    number = costs.number(strategies)
    key = (operator_signature(eqn), moved, number, late, together)
    known = costs.operators.get(key)
    if known is None:
        known = compute_seconds(costs, eqn, rule, strategies, moved)
        if rule is not None:
            inner = _inner_seconds(costs, eqn, rule, strategies, number, late, together)
            known = known if inner is None else known + inner
        costs.operators[key] = known
    return known


def compute_seconds(
    costs: MeshCosts,
    eqn: JaxprEqn,
    rule: ShardingRule | None,
    strategies: tuple[Strategy, ...],
    moved: float,
) -> Floats:
    """Return [strategies] seconds of an operator's part on one device, which moves its part of the
    `moved` bytes."""
    number = costs.number(strategies)
    work, kind, dtype = _work_of(eqn, costs.platform)
    patch_bytes = operator_of(eqn).patch_bytes if costs.platform == "cpu" else None
    shards = costs.layouts.shards(number)
    if costs.model.program is not None and rule is not None and kind == "matmul":
        kind, shapes = product_shapes(costs.mesh, eqn, rule, strategies)
        if shapes:
            return np.array(
                [
                    costs.kernel_seconds(kind, work / count, moved / count, dtype, shape)
                    for count, shape in zip(shards, shapes, strict=True)
                ]
            )
    if patch_bytes is not None and rule is not None:
        patches = [patch_bytes(eqn, rule, strategy, costs.mesh) for strategy in strategies]
        return np.array(
            [
                costs.kernel_seconds(kind, work / count, moved / count + patch, dtype)
                for count, patch in zip(shards, patches, strict=True)
            ]
        )
    counts, places = costs.layouts.shard_counts(number)
    seconds = [costs.kernel_seconds(kind, work / n, moved / n, dtype) for n in counts]
    found: Floats = np.array(seconds)[places]
    return found


def product_shapes(
    mesh: LogicalMesh, eqn: JaxprEqn, rule: ShardingRule, strategies: Sequence[Strategy]
) -> tuple[str, list[tuple[int, ...]]]:
    """Return the kernel that a product is and, by strategy, its ([batch,] m, n, k) on a device.

    Products of batches of heads are attention's. No shapes of what is no product of two.
    """
    dims = product_dims(eqn)
    if dims is None:
        return "matmul", []
    (contracted, _), (batch, _) = dims
    left, right = ([names[0] if names else "" for names in operand] for operand in rule.operands)
    parts = (
        [left[dim] for dim in batch],
        [name for dim, name in enumerate(left) if dim not in (*batch, *contracted)],
        [name for name in right if name not in left],
        [left[dim] for dim in contracted],
    )
    sizes = {factor.name: factor.size for factor in rule.factors} | {"": 1}
    shapes = []
    for strategy in strategies:
        axes = dict(strategy.assignment)
        shapes.append(
            tuple(
                max(1, math.prod(sizes[n] // mesh.size(axes.get(n, ())) for n in names))
                for names in parts
            )
        )
    return "attention" if len(batch) > 1 else "matmul", shapes


@cached_by_program(1 << 17)  # equations are on many meshes
def _work_of(eqn: JaxprEqn, platform: str) -> tuple[float, str, str]:
    """Return an operator's operations, its kernel and the dtype whose peak holds."""
    dtype, passes = arithmetic(eqn, platform)
    return passes * flops(eqn), kernel_kind(eqn), dtype


def _inner_seconds(
    costs: MeshCosts,
    eqn: JaxprEqn,
    rule: ShardingRule,
    strategies: Sequence[Strategy],
    number: int,
    late: bool,
    together: int,
) -> Floats | None:
    """Return [strategies] seconds of collectives inside an operator, and of sums it completes
    itself; None where there are none.

    Sums over "add" factors are completed elsewhere for operators with a node of their own.
    """
    kinds = {factor.kind for factor in rule.factors}
    if kinds.isdisjoint(("permutation", "reduction")):
        return None
    totals = np.zeros(len(strategies))
    exchanged = {factor.name for factor in rule.factors if factor.kind == "permutation"}
    if exchanged:
        exchanges = _exchanges_of(eqn, rule)
        for place, strategy in enumerate(strategies):
            if any(name in exchanged for name, _ in strategy.assignment):
                for sent in exchanges(eqn, strategy, costs.mesh):
                    totals[place] += costs.collective_seconds(*sent)
    if "reduction" not in kinds:
        return totals
    sizes = [tensor_bytes(var) for var in eqn.outvars]
    sums = costs.layouts.own_sums(rule, number)
    seconds = []
    for result, parts, axes in sums.distinct:
        size = sizes[result] / parts
        if late:
            found = costs.collective_seconds("all-reduce", size, axes, in_buckets=True)
        else:
            found = costs.collective_seconds("all-reduce", size * together, axes) / together
        seconds.append(found)
    sums.added_to(totals, seconds)
    return totals


def strategy_sends(
    costs: MeshCosts,
    eqn: JaxprEqn,
    rule: ShardingRule,
    late: bool,
    together: int,
    times: float,
    strategy: Strategy,
) -> Iterator[tuple[Sent, bool, float]]:
    """Yield the collectives that `operator_seconds` counts for a strategy, `times` a step: what is
    sent, whether in buckets, and how often it counts."""
    exchanged = {factor.name for factor in rule.factors if factor.kind == "permutation"}
    if any(name in exchanged for name, _ in strategy.assignment):
        for sent in _exchanges_of(eqn, rule)(eqn, strategy, costs.mesh):
            yield sent, False, times
    for kind, size, axes in own_sums(eqn, rule, strategy, costs.mesh):
        if late:
            yield (kind, size, axes), True, times
        else:
            yield (kind, size * together, axes), False, times / together


def _exchanges_of(eqn: JaxprEqn, rule: ShardingRule) -> ExchangeFunction:
    """Return what yields the collectives inside an operator under a strategy of `rule`."""
    return operator_of(eqn).exchanges or functools.partial(_halos, rule)


def _halos(
    rule: ShardingRule, eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh
) -> Iterator[Sent]:
    """Yield the exchange with a neighbour along each sharded permutation factor.

    `rule` may be that of the same operator at another size: dims of size 1 have no factor.
    """
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
            sizes = dict(zip(dims, shape_of(atom), strict=True))
            size = sizes.get((name,), factor.size)
            return tensor_bytes(atom) / mesh.size(axes) / size * max(factor.halo, 1)
    return 0.0
