"""Products that sum over shared dims: dot_general and ragged_dot_general."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, shape_of
from alpa_meta.operators.operator import (
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    same_params,
)

DimPairs = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The dims of both operands that a product sums over, and those of its batch."""


def product_dims(eqn: JaxprEqn) -> DimPairs | None:
    """Return the dims of a product of two arrays; None of any other operator."""
    if eqn.primitive.name != "dot_general":
        return None
    dims: DimPairs = eqn.params["dimension_numbers"]
    return dims


def product_matrices(
    eqn: JaxprEqn,
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
    """Return how XLA takes the operands of a product of two arrays: dims of the batch, of rows and
    of columns, which are summed over on the left, the others on the right; of any other operator
    nothing."""
    dims = product_dims(eqn)
    if dims is None:
        return ()
    (left_summed, right_summed), (left_batch, right_batch) = dims
    left, right = (
        tuple(d for d in range(len(shape)) if d not in {*summed, *batch})
        for shape, summed, batch in zip(operand_shapes(eqn), *dims, strict=True)
    )
    return (
        (tuple(left_batch), left, tuple(left_summed)),
        (tuple(right_batch), tuple(right_summed), right),
    )


def _dot_dims(
    factors: Factors, shapes: list[tuple[int, ...]], dimension_numbers: Array
) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """Return the dims of both operands and of the result: batch, left free, right free."""
    (left_contracting, right_contracting), (left_batch, right_batch) = dimension_numbers
    left: list[Dim | None] = [None] * len(shapes[0])
    right: list[Dim | None] = [None] * len(shapes[1])
    result: list[Dim] = []
    for a, b in zip(left_batch, right_batch):
        left[a] = right[b] = factors.new(shapes[0][a])
        result.append(left[a] or ())
    for a, b in zip(left_contracting, right_contracting):
        left[a] = right[b] = factors.new(shapes[0][a], "reduction")
    for dims, shape in ((left, shapes[0]), (right, shapes[1])):
        for position, dim in enumerate(dims):
            if dim is None:
                dims[position] = factors.new(shape[position])
                result.append(dims[position] or ())
    return [dim or () for dim in left], [dim or () for dim in right], result


def _dot_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    left, right, result = _dot_dims(factors, operand_shapes(eqn), eqn.params["dimension_numbers"])
    return factors.rule([left, right], [result])


def _run_dot(call: LocalCall) -> list[Array]:
    return call.bind(out_sharding=None) if "out_sharding" in call.eqn.params else call.bind()


def _ragged_rule(eqn: JaxprEqn) -> ShardingRule | None:
    """Return the rule of a grouped product whose ragged dim is cut by `group_sizes`.

    Rows of the ragged dim may be sharded: each device counts how many of its rows fall into each
    group. Groups (experts) may be sharded too: each device multiplies the rows of its groups, and
    the results, zero elsewhere, are summed; a result per group stays where its group is.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    shapes = operand_shapes(eqn)
    if eqn.params.get("group_offset") is not None or len(shapes) != 3 or len(shapes[2]) != 1:
        return None
    ((left_contracting, right_contracting), (left_batch, right_batch)) = (
        numbers.dot_dimension_numbers
    )
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in left_batch:
        return None
    factors = Factors()
    left: list[Dim | None] = [None] * len(shapes[0])
    right: list[Dim | None] = [None] * len(shapes[1])
    result: list[Dim] = []
    for a, b in zip(left_batch, right_batch):
        left[a] = right[b] = factors.new(shapes[0][a])
        result.append(left[a] or ())
    for a, b in zip(left_contracting, right_contracting):
        left[a] = right[b] = factors.new(shapes[0][a], "reduction")
    for group in numbers.rhs_group_dimensions:
        right[group] = factors.new(shapes[1][group], "reduction")
    for dims, shape in ((left, shapes[0]), (right, shapes[1])):
        for position, dim in enumerate(dims):
            if dim is None:
                dims[position] = factors.new(shape[position])
                result.append(dims[position] or ())
    if ragged in left_contracting:
        result.insert(0, factors.new(shapes[2][0]))
    if len(result) != len(shape_of(eqn.outvars[0])):
        return None
    return factors.rule([[dim or () for dim in left], [dim or () for dim in right], [()]], [result])


def _run_ragged(call: LocalCall) -> list[Array]:
    numbers = call.eqn.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    (left_contracting, right_contracting), (left_batch, _) = numbers.dot_dimension_numbers
    per_group = ragged in left_contracting
    left, right, sizes = call.operands
    axes = call.operand_axes(0, ragged)
    if axes:
        rows = left.shape[ragged]
        first = (call.index(axes) * rows).astype(sizes.dtype)
        stops = jnp.cumsum(sizes)
        clipped = jnp.clip(stops - first, 0, rows) - jnp.clip(stops - sizes - first, 0, rows)
        sizes = clipped.astype(sizes.dtype)
    groups = numbers.rhs_group_dimensions
    axes = call.result_axes(0, 0) if per_group else call.operand_axes(1, groups[0])
    if not axes:
        return call.bind([left, right, sizes])
    count = sizes.shape[0] // call.shards(axes)
    first = call.index(axes) * count
    before = jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0).sum()
    sizes = lax.dynamic_slice_in_dim(sizes, first, count)
    left = jnp.roll(left, -before, ragged)
    if per_group:
        paired = right_contracting[list(left_contracting).index(ragged)]
        return call.bind([left, jnp.roll(right, -before, paired), sizes])
    (product,) = call.bind([left, right, sizes])
    fixed = {*left_contracting, *left_batch}
    dim = len(left_batch) + sum(d not in fixed for d in range(ragged))
    own = lax.broadcasted_iota(sizes.dtype, product.shape, dim) < sizes.sum()
    return [jnp.roll(jnp.where(own, product, jnp.zeros_like(product)), before, dim)]


def _ragged_flops(eqn: JaxprEqn) -> float:
    """Return twice the product of rows, depth and columns: a row meets one group only."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, right_contracting), (batch, right_batch) = numbers.dot_dimension_numbers
    left, right = operand_shapes(eqn)[:2]
    shared = {*contracting, *batch}
    taken = {*right_contracting, *right_batch, *numbers.rhs_group_dimensions}
    free = math.prod(size for d, size in enumerate(right) if d not in taken)
    rows = math.prod(size for d, size in enumerate(left) if d not in shared)
    return float(2 * rows * math.prod(left[d] for d in shared) * free)


_product = functools.partial(Operator, heavy=True, kernel="matmul", linear_in=((0,), (1,)))

OPERATORS = {
    "dot_general": _product(_dot_rule, _run_dot, piece_params=same_params, reorders=True),
    "ragged_dot_general": _product(_ragged_rule, _run_ragged, flops=_ragged_flops, in_blocks=True),
}
