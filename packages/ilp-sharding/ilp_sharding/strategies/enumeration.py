"""All strategies of an operator, from its sharding rule alone.

A strategy assigns each mesh axis to at most one factor of the operator. That fixes how every
operand and result is sharded. Where a reduction factor is sharded the result is first a partial
sum; the strategy also says how it is completed, per axis: all-reduce, reduce-scatter onto a result
dim, or left partial where the program allows it. -> implemented in `enumerate_strategies`.

An axis may be assigned to a factor only if it divides it, and only if the factor is the leading
factor of every dim it appears in (a minor factor of a merged dim would be sharded with a stride).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen

from alpa_interchange import LogicalMesh, ShardingRule, ShardingSpec, Strategy

__all__ = [
    "StrategyOptions",
    "completed_specs",
    "enumerate_strategies",
    "natural_strategies",
    "shardable_factors",
]


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
    partial_allowed = bool(options.partial_results) and all(options.partial_results)
    strategies: dict[Strategy, None] = {}
    for natural in natural_strategies(rule, mesh):
        if len(natural.results) != 1:
            strategies[natural] = None
            continue
        shape = [_dim_size(rule, dim) for dim in rule.results[0]]
        for final in completed_specs(natural.results[0], shape, mesh, partial_allowed):
            strategies[evolve(natural, results=(final,))] = None
        if options.pass_partial and partial_allowed and not natural.results[0].partial:
            strategies.update((passing, None) for passing in _passing(natural, mesh))
    return tuple(strategies)


def natural_strategies(rule: ShardingRule, mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """Return a strategy per assignment of mesh axes to factors, sums left partial.

    The replicated strategy comes first. Operators with several results complete their sums.
    """
    axes = [axis for axis in mesh.axes if axis.size > 1]
    strategies: dict[Strategy, None] = {}
    for choice in itertools.product((None, *shardable_factors(rule)), repeat=len(axes)):
        assignment: dict[str, tuple[str, ...]] = {}
        for axis, name in zip(axes, choice, strict=True):
            if name is not None:
                assignment[name] = assignment.get(name, ()) + (axis.name,)
        if any(rule.factor(name).size % mesh.size(names) for name, names in assignment.items()):
            continue
        strategies[_natural(rule, mesh, assignment)] = None
    return tuple(strategies)


def completed_specs(
    natural: ShardingSpec, shape: Sequence[int], mesh: LogicalMesh, partial_allowed: bool
) -> tuple[ShardingSpec, ...]:
    """Return every spec in which partial sums of a tensor can be completed, all-reduced first.

    Each partial axis is all-reduced, reduce-scattered onto a dim it divides, or, if allowed, left.
    """
    reduce, leave = "reduce", "leave"
    options: list[str | int] = [reduce, *range(len(shape)), *([leave] if partial_allowed else [])]
    finals: dict[ShardingSpec, None] = {}
    for choice in itertools.product(options, repeat=len(natural.partial)):
        placed = list(natural.dims)
        for axis, where in zip(natural.partial, choice, strict=True):
            if isinstance(where, int):
                placed[where] = placed[where] + (axis,)
        if all(size % mesh.size(axes) == 0 for size, axes in zip(shape, placed, strict=True)):
            pairs = zip(natural.partial, choice, strict=True)
            left = tuple(axis for axis, where in pairs if where == leave)
            finals[ShardingSpec(tuple(placed), left)] = None
    return tuple(finals)


def shardable_factors(rule: ShardingRule) -> tuple[str, ...]:
    """Return the factors that mesh axes may be assigned to."""
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


def _natural(
    rule: ShardingRule, mesh: LogicalMesh, assignment: Mapping[str, tuple[str, ...]]
) -> Strategy:
    def sharded(dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(axis for name in dim for axis in assignment.get(name, ())) for dim in dims
        )

    added = {
        axis
        for name, names in assignment.items()
        if rule.factor(name).kind == "reduction" and rule.factor(name).reduction == "add"
        for axis in names
    }
    summed = tuple(name for name in mesh.axis_names if name in added)
    partial = summed if len(rule.results) == 1 else ()
    return Strategy(
        assignment=tuple(sorted(assignment.items())),
        operands=tuple(ShardingSpec(sharded(dims)) for dims in rule.operands),
        results=tuple(ShardingSpec(sharded(dims), partial) for dims in rule.results),
    )


def _passing(natural: Strategy, mesh: LogicalMesh) -> Iterator[Strategy]:
    """Yield the strategies in which unreduced sums over idle axes pass through the operator."""
    used = {axis for _, axes in natural.assignment for axis in axes}
    idle = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name not in used]
    for length in range(1, len(idle) + 1):
        for axes in itertools.combinations(idle, length):
            yield evolve(
                natural,
                operands=tuple(ShardingSpec(spec.dims, axes) for spec in natural.operands),
                results=tuple(ShardingSpec(spec.dims, axes) for spec in natural.results),
            )


def _dim_size(rule: ShardingRule, dim: tuple[str, ...]) -> int:
    size = 1
    for name in dim:
        size *= rule.factor(name).size
    return size
