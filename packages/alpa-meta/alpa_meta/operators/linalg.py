"""Matrix decompositions and solves, and Fourier transforms: the leading dims are batches."""

from __future__ import annotations

import math

from jax import Array

from alpa_interchange import ShardingRule
from alpa_meta import compat
from alpa_meta.compat import JaxprEqn
from alpa_meta.operators.operator import (
    FIRST,
    CountFunction,
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    result_shapes,
)

_CORE_RANKS = {
    "cholesky": 2,
    "cholesky_update": 2,
    "eig": 2,
    "eigh": 2,
    "geqp3": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}
"""Trailing dims of the first operand that one matrix (or vector) takes; the rest are batches."""

_FACTORS = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "geqrf": 4 / 3,
    "householder_product": 4 / 3,
    "eigh": 9.0,
    "eig": 25.0,
    "svd": 20.0,
}
"""Floating-point operations of n x n matrices, in units of n^3 (Golub and Van Loan)."""


def _batched_rule(eqn: JaxprEqn) -> ShardingRule | None:
    shapes = operand_shapes(eqn)
    num_batches = len(shapes[0]) - _CORE_RANKS[eqn.primitive.name]
    batch = shapes[0][:num_batches]
    if any(shape[:num_batches] != batch for shape in shapes + result_shapes(eqn)):
        return None
    factors = Factors()
    dims = factors.each(batch)

    def padded(shape: tuple[int, ...]) -> list[Dim]:
        return dims + [()] * (len(shape) - num_batches)

    return factors.rule([padded(s) for s in shapes], [padded(s) for s in result_shapes(eqn)])


def _triangular_solve_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of solving with a triangular matrix: right-hand sides are independent."""
    matrix, sides = operand_shapes(eqn)
    factors = Factors()
    batch = factors.each(matrix[:-2])
    free = factors.new(sides[-1] if eqn.params["left_side"] else sides[-2])
    right: list[Dim] = [*batch, (), free] if eqn.params["left_side"] else [*batch, free, ()]
    return factors.rule([[*batch, (), ()], right], [right])


def _fourier_rule(eqn: JaxprEqn) -> ShardingRule:
    rank = len(eqn.params["fft_lengths"])
    factors = Factors()
    shape = operand_shapes(eqn)[0]
    dims: list[Dim] = factors.each(shape[: len(shape) - rank]) + [()] * rank
    return factors.rule([dims], [dims])


def _run_fourier(call: LocalCall) -> list[Array]:
    """Return the transform of the local part, stored row-major as XLA's CPU transform needs it.

    XLA may store it in the order that a collective before or after prefers, and then not run it.
    """
    (operand,) = call.operands
    return [compat.row_major(value) for value in call.bind([compat.row_major(operand)])]


def _matrix_flops(factor: float) -> CountFunction:
    """Return the count of `factor` times rows, columns and the smaller of both, per matrix."""

    def count(eqn: JaxprEqn) -> float:
        shape = operand_shapes(eqn)[0]
        return factor * math.prod(shape) * min(shape[-2:])

    return count


def _solve_flops(eqn: JaxprEqn) -> float:
    matrix, sides = operand_shapes(eqn)
    return float(math.prod(sides) * matrix[-1])


def _fourier_flops(eqn: JaxprEqn) -> float:
    length = math.prod(eqn.params["fft_lengths"])
    size = max(math.prod(operand_shapes(eqn)[0]), math.prod(result_shapes(eqn)[0]))
    return 5.0 * size * max(math.log2(max(length, 1)), 1.0)


OPERATORS = {
    name: Operator(_batched_rule, flops=_matrix_flops(_FACTORS[name]) if name in _FACTORS else None)
    for name in _CORE_RANKS
} | {
    "triangular_solve": Operator(_triangular_solve_rule, linear_in=((1,),), flops=_solve_flops),
    "fft": Operator(_fourier_rule, _run_fourier, linear_in=FIRST, flops=_fourier_flops),
}
