"""Matrix decompositions and solves, and Fourier transforms: the leading dims are batches."""

from __future__ import annotations

from typing import Any

from alpa_interchange import ShardingRule
from alpa_meta import compat
from alpa_meta.operators.operator import (
    FIRST,
    Dim,
    Factors,
    LocalCall,
    Operator,
    always_linear,
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


def _batched_rule(eqn: Any) -> ShardingRule | None:
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


def _triangular_solve_rule(eqn: Any) -> ShardingRule:
    """Return the rule of solving with a triangular matrix: right-hand sides are independent."""
    matrix, sides = operand_shapes(eqn)
    factors = Factors()
    batch = factors.each(matrix[:-2])
    free = factors.new(sides[-1] if eqn.params["left_side"] else sides[-2])
    right: list[Dim] = [*batch, (), free] if eqn.params["left_side"] else [*batch, free, ()]
    return factors.rule([[*batch, (), ()], right], [right])


def _fourier_rule(eqn: Any) -> ShardingRule:
    rank = len(eqn.params["fft_lengths"])
    factors = Factors()
    shape = operand_shapes(eqn)[0]
    dims: list[Dim] = factors.each(shape[: len(shape) - rank]) + [()] * rank
    return factors.rule([dims], [dims])


def _run_fourier(call: LocalCall) -> list[Any]:
    """Return the transform of the local part, stored row-major as XLA's CPU transform needs it.

    XLA may store it in the order that a collective before or after prefers, and then not run it.
    """
    (operand,) = call.operands
    return [compat.row_major(value) for value in call.bind([compat.row_major(operand)])]


OPERATORS = {name: Operator(_batched_rule) for name in _CORE_RANKS} | {
    "triangular_solve": Operator(_triangular_solve_rule, linear_in=((1,),)),
    "fft": Operator(_fourier_rule, _run_fourier, always_linear, linear_in=FIRST),
}
