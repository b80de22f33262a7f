"""Operators that depend on the order along a dim: running sums, sorting, the largest few."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn
from alpa_meta.operators.operator import (
    FIRST,
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    result_shapes,
)
from alpa_meta.operators.reduction import extreme
from alpa_meta.operators.work import nothing, operand_elements


def _prefix_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a running sum: the dim may be sharded, device totals are exchanged."""
    axis = eqn.params["axis"]
    factors = Factors()
    shape = operand_shapes(eqn)[0]
    dims = [
        factors.new(size, "permutation" if d == axis else "parallel")
        for d, size in enumerate(shape)
    ]
    return factors.rule([dims], [dims])


def _run_prefix(call: LocalCall) -> list[Array]:
    """Return the local running sums, each joined with the totals of the devices before this one."""
    axis, reverse = call.eqn.params["axis"], call.eqn.params["reverse"]
    (local,) = call.bind()
    axes = call.operand_axes(0, axis)
    if not axes:
        return [local]
    last = 0 if reverse else local.shape[axis] - 1
    total = lax.slice_in_dim(local, last, last + 1, axis=axis)
    totals = call.collectives.all_gather(total, axes, axis, "totals of a running sum")
    here = call.index(axes)
    number = lax.broadcasted_iota(jnp.int32, totals.shape, axis)
    earlier = number > here if reverse else number < here
    name = call.eqn.primitive.name
    if name == "cumsum":
        before = jnp.where(earlier, totals, 0).sum(axis, keepdims=True, dtype=local.dtype)
        return [local + before]
    if name == "cumprod":
        before = jnp.where(earlier, totals, 1).prod(axis, keepdims=True, dtype=local.dtype)
        return [local * before]
    if name == "cumlogsumexp":
        masked = jnp.where(earlier, totals, -jnp.inf)
        return [jnp.logaddexp(local, _logsumexp(masked, axis))]
    combine, reduce = (lax.max, lax.reduce_max) if name == "cummax" else (lax.min, lax.reduce_min)
    neutral = extreme(local.dtype, lowest=name == "cummax")
    masked = jnp.where(earlier, totals, jnp.asarray(neutral, local.dtype))
    return [combine(local, jnp.expand_dims(reduce(masked, axes=(axis,)), axis))]


def _logsumexp(value: Array, axis: int) -> Array:
    top = value.max(axis, keepdims=True)
    safe = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.log(jnp.exp(value - safe).sum(axis, keepdims=True)) + safe


def _ordered_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of an operator that needs one dim whole and treats the others as batches."""
    params = eqn.params
    shape = operand_shapes(eqn)[0]
    place = next(
        params[key] for key in ("dimension", "axis", "reduction_dimension") if key in params
    )
    whole = place % max(len(shape), 1)
    factors = Factors()
    dims: list[Dim] = [() if d == whole else factors.new(size) for d, size in enumerate(shape)]
    return factors.rule([dims] * len(eqn.invars), [dims] * len(eqn.outvars))


def _top_k_rule(eqn: JaxprEqn) -> ShardingRule:
    if "axis" in eqn.params:
        return _ordered_rule(eqn)
    factors = Factors()
    dims: list[Dim] = [*factors.each(operand_shapes(eqn)[0][:-1]), ()]
    return factors.rule([dims], [dims] * len(result_shapes(eqn)))


_running = functools.partial(Operator, heavy=True, flops=operand_elements(0))

OPERATORS = {
    name: _running(_prefix_rule, _run_prefix)
    for name in ("cumprod", "cummax", "cummin", "cumlogsumexp")
} | {
    "cumsum": _running(_prefix_rule, _run_prefix, linear_in=FIRST),
    "sort": Operator(_ordered_rule, flops=nothing),
    "top_k": Operator(_top_k_rule, flops=nothing),
    "approx_top_k": Operator(_ordered_rule),
}


_JOINED = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}


def running_dim(eqn: JaxprEqn) -> int | None:
    """Return the dim that an equation runs along with a sum, product or extreme; None: none."""
    return int(eqn.params["axis"]) if eqn.primitive.name in _JOINED else None


def is_running_sum(eqn: JaxprEqn) -> bool:
    """Return whether an equation makes running sums."""
    return bool(eqn.primitive.name == "cumsum")


def joined(eqn: JaxprEqn, local: Array, before: Array) -> Array:
    """Return the running values of a part of the dim, given the last ones of what is before it."""
    return _JOINED[eqn.primitive.name](local, before)
