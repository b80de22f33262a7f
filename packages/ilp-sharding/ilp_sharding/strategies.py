"""All strategies of an operator, from its sharding rule alone.

A strategy assigns each mesh axis to at most one factor of the operator. That fixes how every operand
and result is sharded. Where a reduction factor is sharded the result is first a partial sum; the
strategy also says how it is completed, per axis: all-reduce, reduce-scatter onto a result dim, or
left partial where the program allows it. -> implemented in `enumerate_strategies`.

An axis may be assigned to a factor only if it divides it, and only if the factor is the leading
factor of every dim it appears in (a minor factor of a merged dim would be sharded with a stride).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from attrs import frozen

from alpa_interchange import LogicalMesh, ShardingRule, ShardingSpec, Strategy

__all__ = ["StrategyOptions", "enumerate_strategies"]


@frozen(kw_only=True)
class StrategyOptions:
    """What an operator's context allows.

    `partial_results[k]`: result k may stay an unreduced sum. `pass_partial`: the operator is linear
    in its tensor operands together, so sums may pass through it unreduced.
    """

    partial_results: tuple[bool, ...] = ()
    pass_partial: bool = False


def enumerate_strategies(
    rule: ShardingRule, mesh: LogicalMesh, options: StrategyOptions | None = None
) -> tuple[Strategy, ...]:
    """Return every strategy of an operator with `rule` on `mesh`, the replicated one first."""
    options = options or StrategyOptions()
    axes = [axis for axis in mesh.axes if axis.size > 1]
    shardable = _shardable_factors(rule)
    strategies: list[Strategy] = []
    seen: set[tuple[object, ...]] = set()
    for choice in itertools.product((None, *shardable), repeat=len(axes)):
        assignment: dict[str, tuple[str, ...]] = {}
        for axis, name in zip(axes, choice, strict=True):
            if name is not None:
                assignment[name] = assignment.get(name, ()) + (axis.name,)
        if any(rule.factor(name).size % mesh.size(names) for name, names in assignment.items()):
            continue
        idle = tuple(axis.name for axis, name in zip(axes, choice, strict=True) if name is None)
        for strategy in _completions(rule, mesh, assignment, idle, options):
            key = (strategy.assignment, strategy.operands, strategy.results)
            if key not in seen:
                seen.add(key)
                strategies.append(strategy)
    return tuple(strategies)


def _shardable_factors(rule: ShardingRule) -> tuple[str, ...]:
    minor = {
        name
        for dims in rule.operands + rule.results
        for dim in dims
        for position, name in enumerate(dim)
        if any(rule.factor(earlier).size > 1 for earlier in dim[:position])
    }
    return tuple(
        factor.name
        for factor in rule.factors
        if factor.kind != "replicate" and factor.name not in minor and factor.size > 1
    )


def _completions(
    rule: ShardingRule,
    mesh: LogicalMesh,
    assignment: dict[str, tuple[str, ...]],
    idle: tuple[str, ...],
    options: StrategyOptions,
) -> Iterator[Strategy]:
    def sharded(dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(axis for name in dim for axis in assignment.get(name, ())) for dim in dims
        )

    operands = tuple(ShardingSpec(sharded(dims)) for dims in rule.operands)
    natural = tuple(sharded(dims) for dims in rule.results)
    summed = tuple(
        axis
        for name, names in assignment.items()
        if rule.factor(name).kind == "reduction" and rule.factor(name).reduction == "add"
        for axis in names
    )
    pairs = tuple(sorted(assignment.items()))
    partial_allowed = bool(options.partial_results) and all(options.partial_results)
    for outcome in _outcomes(rule, mesh, natural, summed, partial_allowed):
        yield Strategy(assignment=pairs, operands=operands, results=outcome)
    if options.pass_partial and partial_allowed and not summed:
        for length in range(1, len(idle) + 1):
            for axes in itertools.combinations(idle, length):
                yield Strategy(
                    assignment=pairs,
                    operands=tuple(ShardingSpec(spec.dims, axes) for spec in operands),
                    results=tuple(ShardingSpec(dims, axes) for dims in natural),
                )


def _outcomes(
    rule: ShardingRule,
    mesh: LogicalMesh,
    natural: tuple[tuple[tuple[str, ...], ...], ...],
    summed: tuple[str, ...],
    partial_allowed: bool,
) -> Iterator[tuple[ShardingSpec, ...]]:
    """Yield the result specs for each way to complete the partial sums over axes `summed`."""
    if len(natural) != 1:
        yield tuple(ShardingSpec(dims) for dims in natural)
        return
    dims = natural[0]
    reduce, leave = "reduce", "leave"
    options: list[str | int] = [reduce, *range(len(dims)), *([leave] if partial_allowed else [])]
    sizes = [_dim_size(rule, dim) for dim in rule.results[0]]
    for choice in itertools.product(options, repeat=len(summed)):
        placed = list(dims)
        for axis, where in zip(summed, choice, strict=True):
            if isinstance(where, int):
                placed[where] = placed[where] + (axis,)
        if any(
            size % mesh.size(axes) for size, axes in zip(sizes, placed, strict=True) if axes
        ):
            continue
        left = tuple(
            axis for axis, where in zip(summed, choice, strict=True) if where == leave
        )
        yield (ShardingSpec(tuple(placed), left),)


def _dim_size(rule: ShardingRule, dim: tuple[str, ...]) -> int:
    size = 1
    for name in dim:
        size *= rule.factor(name).size
    return size
