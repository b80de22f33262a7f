"""From what a device computed to what the plan promises: sums completed, specs converted."""

from __future__ import annotations

import math

from jax import Array

from alpa_interchange import ShardingRule, ShardingSpec, Strategy
from alpa_meta.spmd.collectives import Collectives
from ilp_sharding.strategies import Conversions


def complete(
    value: Array,
    rule: ShardingRule,
    strategy: Strategy,
    result: int,
    collectives: Collectives,
    reason: str,
) -> Array:
    """Return the natural local `result` of an operator with its partial sums completed.

    An axis of a sharded reduction factor is reduce-scattered where the strategy puts it on a dim,
    left where the strategy says partial, and all-reduced otherwise; scattering comes first, because
    the rest then reduces less.
    """
    final = strategy.results[result]
    natural, reduced = natural_result(rule, strategy, result)
    if natural == final and not reduced:
        return value
    value = complete_sums(value, natural, final, collectives, reason)
    for reduction, axes in reduced.items():
        value = collectives.all_reduce(value, axes, reduction, f"{reduction} of {reason}")
    return value


def natural_result(
    rule: ShardingRule, strategy: Strategy, result: int
) -> tuple[ShardingSpec, dict[str, tuple[str, ...]]]:
    """Return the spec that an operator leaves a result in on each device, its sums partial, and
    the axes of reductions of other kinds."""
    reduced: dict[str, tuple[str, ...]] = {}
    for name, axes in strategy.assignment:
        factor = rule.factor(name)
        if factor.kind == "reduction":
            reduced[factor.reduction] = reduced.get(factor.reduction, ()) + axes
    if not reduced:
        return strategy.results[result], {}
    dims = tuple(
        tuple(axis for name in factors for axis in strategy.axes(name))
        for factors in rule.results[result]
    )
    return ShardingSpec(dims, reduced.pop("add", ())), reduced


def complete_sums(
    value: Array,
    natural: ShardingSpec,
    final: ShardingSpec,
    collectives: Collectives,
    reason: str,
) -> Array:
    """Return a local value of spec `natural` with its sums completed to the spec `final`."""
    scattered: list[str] = []
    for dim, (before, after) in enumerate(zip(natural.dims, final.dims, strict=True)):
        added = after[len(before) :]
        if after[: len(before)] != before or any(axis not in natural.partial for axis in added):
            raise ValueError(
                f"the result of {reason!r} must extend its natural spec by summed axes: dim {dim} "
                f"is naturally over {before}, the sums are over {natural.partial}, the spec is "
                f"{final}"
            )
        for axis in added:
            value = collectives.reduce_scatter(value, (axis,), dim, f"sum of {reason}")
            scattered.append(axis)
    left = tuple(
        axis for axis in natural.partial if axis not in scattered and axis not in final.partial
    )
    if left:
        value = collectives.all_reduce(value, left, "add", f"sum of {reason}")
    return value


def convert(
    value: Array,
    shape: tuple[int, ...],
    source: ShardingSpec,
    target: ShardingSpec,
    conversions: Conversions,
    collectives: Collectives,
    reason: str,
) -> Array:
    """Return a local value of spec `source`, of a tensor of `shape`, in spec `target`."""
    if source == target:
        return value
    bytes = float(math.prod(shape) * value.dtype.itemsize)
    for step in conversions.steps(shape, bytes, source, target):
        if step.kind == "slice":
            value = collectives.part(value, step.axes, step.dim)
        elif step.kind == "mask":
            value = collectives.first_only(value, step.axes)
        elif step.kind == "all-gather":
            value = collectives.all_gather(value, step.axes, step.dim, reason)
        elif step.kind == "all-to-all":
            value = collectives.all_to_all(value, step.axes, step.dim, step.to_dim, reason)
        elif step.kind == "all-reduce":
            value = collectives.all_reduce(value, step.axes, "add", reason)
        elif step.kind == "reduce-scatter":
            value = collectives.reduce_scatter(value, step.axes, step.dim, reason)
        else:
            raise ValueError(f"no collective carries out the conversion step {step}")
    return value
