"""Work of one equation, not sharded: floating-point operations and bytes moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from alpa_meta import compat
from alpa_meta.operators.elementwise import OPERATORS as ELEMENTWISE
from alpa_meta.operators.operator import operand_shapes, result_shapes

_FREE = frozenset(
    """
    reshape squeeze broadcast_in_dim iota bitcast_convert_type copy optimization_barrier name
    device_put sharding_constraint mesh_cast reshard pvary layout_constraint stop_gradient
    random_wrap random_unwrap random_clone empty empty2 axis_index alpa_pin alpa_read
    """.split()
)
"""Operators that XLA folds into their readers, or that move nothing."""

_MOVES = frozenset(
    """
    transpose rev slice pad concatenate split dynamic_slice dynamic_update_slice gather sort top_k
    convert_element_type select_n real imag complex conj expand_dims
    """.split()
)


def flops(eqn: Any) -> float:
    """Return the floating-point operations of `eqn`; a multiply-add is two.

    The body of a loop is counted once; of several branches the largest counts.
    """
    name = eqn.primitive.name
    bodies = compat.subjaxprs(eqn)
    if bodies and name not in _WITH_FUNCTIONS:
        totals = [sum(flops(e) for e in compat.open_jaxpr(body).eqns) for _, body in bodies]
        return max(totals) if name == "cond" else sum(totals)
    if name in _COUNTS:
        return _COUNTS[name](eqn)
    if name in _FREE or name in _MOVES:
        return 0.0
    if name.startswith(("reduce_", "arg", "cum", "scatter")):
        return float(_size(operand_shapes(eqn)[-1 if name.startswith("scatter") else 0]))
    return float(sum(_size(shape) for shape in result_shapes(eqn)))


def traffic_bytes(eqn: Any) -> float:
    """Return the bytes that `eqn` moves through memory.

    Elementwise operators count their results only, since the compiler fuses them with what produces
    their operands; the others count operands and results. Bodies of loops are counted once.
    """
    name = eqn.primitive.name
    bodies = compat.subjaxprs(eqn)
    if bodies and name not in _WITH_FUNCTIONS:
        totals = [sum(traffic_bytes(e) for e in compat.open_jaxpr(body).eqns) for _, body in bodies]
        return max(totals) if name == "cond" else sum(totals)
    if name in _FREE:
        return 0.0
    results = sum(_bytes(var.aval) for var in eqn.outvars)
    if name in ELEMENTWISE or name.startswith("random_"):
        return results
    if name in ("gather", "dynamic_slice", "slice"):
        return 2 * results
    if name == "dynamic_update_slice":
        return 2 * _bytes(eqn.invars[1].aval)
    if name.startswith("scatter"):
        return 3 * _bytes(eqn.invars[2].aval)
    return results + sum(_bytes(atom.aval) for atom in eqn.invars)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _bytes(aval: Any) -> float:
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return 0.0 if dtype is None else float(math.prod(shape) * dtype.itemsize)


def _dot(eqn: Any) -> float:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(operand_shapes(eqn)[0][d] for d in contracting)
    return float(2 * _size(result_shapes(eqn)[0]) * depth)


def _ragged_dot(eqn: Any) -> float:
    (contracting, _), batch = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    left, right = operand_shapes(eqn)[:2]
    shared = {*contracting, *batch[0]}
    groups = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    ((_, right_contracting), (_, right_batch)) = eqn.params[
        "ragged_dot_dimension_numbers"
    ].dot_dimension_numbers
    taken = {*right_contracting, *right_batch, *groups}
    free = math.prod(size for d, size in enumerate(right) if d not in taken)
    rows = math.prod(size for d, size in enumerate(left) if d not in shared)
    depth = math.prod(left[d] for d in shared)
    return float(2 * rows * depth * free)


def _convolution(eqn: Any) -> float:
    """Each result element sums over the window and the input channels of its group.

    Zeros between the elements of a dilated input are not multiplied.
    """
    numbers = eqn.params["dimension_numbers"]
    right = operand_shapes(eqn)[1]
    window = math.prod(right[d] for d in numbers.rhs_spec[1:])
    skipped = math.prod(eqn.params["lhs_dilation"])
    return float(2 * _size(result_shapes(eqn)[0]) * window / skipped)


def _fourier(eqn: Any) -> float:
    length = math.prod(eqn.params["fft_lengths"])
    size = max(_size(operand_shapes(eqn)[0]), _size(result_shapes(eqn)[0]))
    return 5.0 * size * max(math.log2(max(length, 1)), 1.0)


def _matrix(factor: float) -> Callable[[Any], float]:
    def count(eqn: Any) -> float:
        shape = operand_shapes(eqn)[0]
        return factor * _size(shape) * min(shape[-2:])

    return count


def _triangular(eqn: Any) -> float:
    return float(_size(operand_shapes(eqn)[1]) * operand_shapes(eqn)[0][-1])


def _window(eqn: Any) -> float:
    return float(_size(result_shapes(eqn)[0]) * math.prod(eqn.params["window_dimensions"]))


_COUNTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "fft": _fourier,
    "cholesky": _matrix(1 / 3),
    "lu": _matrix(2 / 3),
    "qr": _matrix(4 / 3),
    "geqrf": _matrix(4 / 3),
    "householder_product": _matrix(4 / 3),
    "eigh": _matrix(9.0),
    "eig": _matrix(25.0),
    "svd": _matrix(20.0),
    "triangular_solve": _triangular,
    "reduce_window": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
}
_WITH_FUNCTIONS = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max sort".split()
    + "scatter_add scatter_mul scatter_min scatter_max scatter-sub scatter_sub".split()
)
"""Operators whose parameters hold a scalar function, which is not a body to be counted."""
