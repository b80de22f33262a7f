"""Convolutions by batch, channels, groups, and spatial dims whose edges neighbours exchange."""

from __future__ import annotations

import math

from jax import Array

from alpa_interchange import LogicalMesh, ShardingRule, Strategy
from alpa_meta.compat import JaxprEqn, dtype_of
from alpa_meta.operators.halo import exchange
from alpa_meta.operators.operator import (
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    result_shapes,
)

_CACHE_LINE = 64.0  # bytes


def _rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a convolution.

    Left [batch, channels, spatial], right [out, in, window], result [batch, out, spatial], in the
    layout the dimension numbers say. Feature groups split channels and out, batch groups split
    batch and out; a group factor is the leading one of the dims it is in. A spatial dim may be
    sharded when the result's size is the input's divided by the stride (or times the dilation of
    the input), so that each device makes the part of the result that lies over its input.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    left_shape, right_shape = operand_shapes(eqn)
    (result_shape,) = result_shapes(eqn)
    left_spec, right_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    factors = Factors()
    left: list[Dim] = [()] * len(left_shape)
    right: list[Dim] = [()] * len(right_shape)
    result: list[Dim] = [()] * len(result_shape)
    in_group = right_shape[right_spec[1]]
    groups = factors.new(feature_groups * batch_groups)
    batch = factors.new(result_shape[out_spec[0]])
    contracted = factors.new(in_group, "reduction")
    out = factors.new(right_shape[right_spec[0]] // (feature_groups * batch_groups))
    left[left_spec[0]] = groups + batch if batch_groups > 1 else batch
    left[left_spec[1]] = groups + contracted if feature_groups > 1 else contracted
    right[right_spec[0]] = groups + out
    right[right_spec[1]] = contracted
    result[out_spec[0]] = batch
    result[out_spec[1]] = groups + out
    for k, (place, window_place, out_place) in enumerate(
        zip(left_spec[2:], right_spec[2:], out_spec[2:])
    ):
        dims = _spatial_dims(
            factors,
            left_shape[place],
            result_shape[out_place],
            stride=params["window_strides"][k],
            dilation=params["lhs_dilation"][k],
            reach=(right_shape[window_place] - 1) * params["rhs_dilation"][k],
            before=params["padding"][k][0],
        )
        if dims is not None:
            left[place], result[out_place] = dims
    return factors.rule([left, right], [result])


def _spatial_dims(
    factors: Factors,
    size: int,
    out_size: int,
    *,
    stride: int,
    dilation: int,
    reach: int,
    before: int,
) -> tuple[Dim, Dim] | None:
    """Return the dims of a spatial dim in the input and in the result; None: not to be sharded."""
    if dilation == 1 and out_size * stride == size:
        needed = _halo(stride, reach, before)
        kind = "permutation" if any(needed) else "parallel"
        shared = factors.new(out_size, kind, halo=max(needed))
        return shared + factors.new(stride, "replicate"), shared
    if stride == 1 and dilation > 1 and size * dilation == out_size:
        needed = _dilated_halo(dilation, reach, before)
        kind = "permutation" if any(needed) else "parallel"
        shared = factors.new(size, kind, halo=max(needed))
        return shared, shared + factors.new(dilation, "replicate")
    return None


def _halo(stride: int, reach: int, before: int) -> tuple[int, int]:
    """Return the elements needed from the left and the right neighbour; padding is `before`.

    Result i reads inputs i * stride - before up to i * stride - before + reach.
    """
    return max(before, 0), max(reach - stride + 1 - before, 0)


def _dilated_halo(dilation: int, reach: int, before: int) -> tuple[int, int]:
    """Return the same for an input with `dilation - 1` zeros between its elements."""
    return max(before // dilation, 0), max((reach - 1 - before) // dilation + 1, 0)


def _run(call: LocalCall) -> list[Array]:
    params, numbers = call.eqn.params, call.eqn.params["dimension_numbers"]
    left, right = call.operands
    padding = [tuple(pair) for pair in params["padding"]]
    spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:])
    for k, (place, window_place, out_place) in enumerate(spatial):
        axes = call.operand_axes(0, place)
        if not axes:
            continue
        stride, dilation = params["window_strides"][k], params["lhs_dilation"][k]
        reach = (right.shape[window_place] - 1) * params["rhs_dilation"][k]
        before = padding[k][0]
        lows, highs = (
            _halo(stride, reach, before)
            if dilation == 1
            else _dilated_halo(dilation, reach, before)
        )
        left = exchange(call, left, axes, place, lows, highs)
        wanted = call.result_shape(0)[out_place]
        covered = (left.shape[place] - 1) * dilation + 1
        first = before - lows * dilation
        padding[k] = (first, (wanted - 1) * stride + reach + 1 - covered - first)
    feature, batch = _local_groups(call)
    return call.bind(
        [left, right],
        padding=tuple(padding),
        feature_group_count=feature,
        batch_group_count=batch,
    )


def _local_groups(call: LocalCall) -> tuple[int, int]:
    """Return the feature and batch groups of one device."""
    params = call.eqn.params
    feature, batch = params["feature_group_count"], params["batch_group_count"]
    if feature * batch == 1:
        return feature, batch
    leading = call.rule.operands[1][params["dimension_numbers"].rhs_spec[0]][:1]
    shards = call.shards(tuple(a for name in leading for a in call.strategy.axes(name)))
    return (feature // shards, batch) if feature > 1 else (feature, batch // shards)


def _flops(eqn: JaxprEqn) -> float:
    """Return those of sums over the window and the input channels of a group, per result element.

    Zeros between the elements of a dilated input are not multiplied.
    """
    right = operand_shapes(eqn)[1]
    window = math.prod(right[d] for d in eqn.params["dimension_numbers"].rhs_spec[1:])
    skipped = math.prod(eqn.params["lhs_dilation"])
    return float(2 * math.prod(result_shapes(eqn)[0]) * window / skipped)


def _patch_bytes(eqn: JaxprEqn, rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh) -> float:
    """Return the bytes of the patches that a device's part of a convolution takes on a CPU.

    XLA's CPU backend multiplies a matrix [result positions, window x input channels] of patches,
    copied in runs of input channels, by one of weights. It is as large however few the output
    channels are, and a run takes no less time than a cache line: measured 7.5 ns for 1 to 32
    float32 channels on one core, jax 0.10.2. Runs of a grouped convolution take half of that once a
    device has 32 groups (3.5 to 5 ns, with fewer 7 to 10).
    """
    work = _flops(eqn)
    params, right, dtype = eqn.params, operand_shapes(eqn)[1], dtype_of(eqn.invars[1])
    out_place, in_place = params["dimension_numbers"].rhs_spec[:2]
    groups = params["feature_group_count"] * params["batch_group_count"]
    runs = work / 2 / max(right[out_place] // groups, 1) / max(right[in_place], 1)
    contracted = set(rule.operands[1][in_place])
    positions = {name for dim in rule.operands[0] for name in dim} - contracted
    channels = right[in_place] / mesh.size(_axes_of(contracted, strategy))
    run_bytes = max(channels * dtype.itemsize, _CACHE_LINE)
    if groups / mesh.size(_axes_of(positions & set(rule.operands[1][out_place]), strategy)) >= 32:
        run_bytes /= 2
    return float(runs / mesh.size(_axes_of(positions, strategy)) * run_bytes)


def _axes_of(names: set[str], strategy: Strategy) -> tuple[str, ...]:
    return tuple(a for name, axes in strategy.assignment if name in names for a in axes)


OPERATORS = {
    "conv_general_dilated": Operator(
        _rule,
        _run,
        linear_in=((0,), (1,)),
        flops=_flops,
        heavy=True,
        kernel="convolution",
        patch_bytes=_patch_bytes,
    )
}


def spatial_places(eqn: JaxprEqn) -> list[tuple[int, int, int]]:
    """Return the dims of the left operand, of the right one and of the result for each spatial dim
    of a convolution; none for other equations."""
    if eqn.primitive.name != "conv_general_dilated":
        return []
    numbers = eqn.params["dimension_numbers"]
    return list(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True))


def host_orders(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """Return the dims of both operands of a convolution, from the major to the minor one, as XLA
    for CPUs takes them: it transposes what lies otherwise (`ConvCanonicalization`). Nothing for
    convolutions in groups and for other equations, which it leaves as they are."""
    if eqn.primitive.name != "conv_general_dilated":
        return ()
    if eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1:
        return ()
    numbers = eqn.params["dimension_numbers"]
    batch, channels, *window = numbers.lhs_spec
    out, contracted, *places = numbers.rhs_spec
    return (batch, *window, channels), (*places, contracted, out)
