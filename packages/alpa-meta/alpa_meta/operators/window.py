"""Sliding windows: pooling forward and backward."""

from __future__ import annotations

import math

from jax import Array
from jax.typing import ArrayLike

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn
from alpa_meta.operators.halo import exchange
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
from alpa_meta.operators.work import result_elements


def _window_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a window reduction.

    A dim with windows of one element is parallel. A dim whose result has the input's size over
    the stride may be sharded; where windows overlap, neighbours exchange the edges.
    """
    params = eqn.params
    operands = operand_shapes(eqn)
    before, after = operands[0], result_shapes(eqn)[0]
    factors = Factors()
    left: list[Dim] = []
    right: list[Dim] = []
    for d, (size, out_size) in enumerate(zip(before, after)):
        stride = params["window_strides"][d]
        if params.get("base_dilation", (1,) * len(before))[d] > 1 or out_size * stride != size:
            left.append(())
            right.append(())
            continue
        needed = _halo(eqn, d)
        shared = factors.new(
            out_size, "permutation" if any(needed) else "parallel", halo=max(needed)
        )
        left.append(shared + factors.new(stride, "replicate"))
        right.append(shared)
    given = [left if len(shape) == len(before) else [()] * len(shape) for shape in operands]
    return factors.rule(given, [right] * len(eqn.outvars))


def _halo(eqn: JaxprEqn, dim: int) -> tuple[int, int]:
    """Return the elements that windows along `dim` read from the left and the right neighbour."""
    params = eqn.params
    dilation = params.get("window_dilation", (1,) * (dim + 1))[dim]
    reach = (params["window_dimensions"][dim] - 1) * dilation
    before = params["padding"][dim][0]
    return max(before, 0), max(reach - params["window_strides"][dim] + 1 - before, 0)


def _run_window(call: LocalCall) -> list[Array]:
    padding = [tuple(pair) for pair in call.eqn.params["padding"]]
    rank = len(padding)
    operands = list(call.operands)
    for d in range(rank):
        if not call.operand_axes(0, d):
            continue
        low, high = _halo(call.eqn, d)
        for k, operand in enumerate(operands):
            if operand.ndim == rank and (low or high):
                filler = _filler(call.eqn, operands, k)
                operands[k] = exchange(call, operand, call.operand_axes(0, d), d, low, high, filler)
        start = padding[d][0] - low
        stride = call.eqn.params["window_strides"][d]
        dilation = call.eqn.params.get("window_dilation", (1,) * rank)[d]
        reach = (call.eqn.params["window_dimensions"][d] - 1) * dilation
        wanted = (call.result_shape(0)[d] - 1) * stride + reach + 1
        padding[d] = (start, wanted - operands[0].shape[d] - start)
    return call.bind(operands, padding=tuple(padding))


def _filler(eqn: JaxprEqn, operands: list[Array], operand: int) -> ArrayLike:
    """Return what padding counts as: the identity of the reduction, so that it changes nothing."""
    name = eqn.primitive.name
    if name in ("reduce_window_max", "reduce_window_min"):
        return extreme(operands[operand].dtype, lowest=name == "reduce_window_max")
    if name == "reduce_window":
        return operands[len(operands) // 2 + operand]
    return 0


def _scatter_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of adding each source element at its window's selected place.

    Windows that neither overlap nor reach past the edge stay on one device; other dims stay whole.
    """
    params = eqn.params
    source, operand = operand_shapes(eqn)[:2]
    factors = Factors()
    left: list[Dim] = []
    right: list[Dim] = []
    for d, (size, total) in enumerate(zip(source, operand)):
        window, stride = params["window_dimensions"][d], params["window_strides"][d]
        apart = window == stride and not any(params["padding"][d]) and size * stride == total
        left.append(factors.new(size) if apart else ())
        right.append(left[-1] + factors.new(stride, "replicate") if apart else ())
    rest: list[list[Dim]] = [[()] * len(shape) for shape in operand_shapes(eqn)[2:]]
    return factors.rule([left, right, *rest], [right])


def _gather_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of reading each tangent at its window's selected place."""
    params = eqn.params
    shape, after = operand_shapes(eqn)[0], result_shapes(eqn)[0]
    factors = Factors()
    left: list[Dim] = []
    right: list[Dim] = []
    for d, (total, size) in enumerate(zip(shape, after)):
        window, stride = params["window_dimensions"][d], params["window_strides"][d]
        dilated = params["base_dilation"][d] > 1 or params["window_dilation"][d] > 1
        apart = window == stride and not any(params["padding"][d]) and size * stride == total
        right.append(factors.new(size) if apart and not dilated else ())
        left.append(right[-1] + factors.new(stride, "replicate") if right[-1] else ())
    return factors.rule([left, left], [right])


def _flops(eqn: JaxprEqn) -> float:
    """Return one operation per result element and element of its window."""
    return result_elements(eqn) * float(math.prod(eqn.params["window_dimensions"]))


OPERATORS = {
    name: Operator(
        _window_rule,
        _run_window,
        linear_in=FIRST if name == "reduce_window_sum" else (),
        flops=_flops,
        heavy=False,
        liveness="reduced",
    )
    for name in ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window")
} | {
    "select_and_scatter_add": Operator(_scatter_rule, linear_in=FIRST, liveness="windows"),
    "select_and_gather_add": Operator(_gather_rule, linear_in=FIRST, heavy=False),
}
