"""Operators that move or repeat elements without computing on them."""

from __future__ import annotations

import functools
import math

from jax import Array, lax

from alpa_interchange import ShardingRule
from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.operators.operator import (
    FIRST,
    Dim,
    Factors,
    LocalCall,
    Operator,
    always,
    jointly,
    operand_shapes,
    result_shapes,
)
from alpa_meta.operators.work import nothing
from alpa_meta.types import Params


def reshape_dims(
    factors: Factors, source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[Dim], list[Dim]]:
    """Return the dims of both sides of a reshape, as products of shared factors.

    Both sides are read from the major end; the common divisor of what is left of a dim on each side
    is a shared factor. Where the rest does not divide, it is cut into factors of its own that stay
    whole, until both sides cover the same number of elements again.
    """
    left: list[Dim] = [()] * len(source)
    right: list[Dim] = [()] * len(target)
    if math.prod(source) == 0:
        return left, right
    sides = (_Side(source, left), _Side(target, right))
    while not (sides[0].done and sides[1].done):
        a, b = sides
        common = math.gcd(a.rest, b.rest)
        if common > 1:
            dim = factors.new(common)
            a.take(common, dim)
            b.take(common, dim)
        else:
            covered = [1, 1]
            while covered[0] == 1 or covered[0] != covered[1]:
                smaller = 0 if covered[0] <= covered[1] else 1
                side = sides[smaller]
                covered[smaller] *= side.rest
                side.take(side.rest, factors.new(side.rest, "replicate"))
    return left, right


class _Side:
    """One side of a reshape, read from the major end."""

    def __init__(self, shape: tuple[int, ...], dims: list[Dim]) -> None:
        self._shape, self._dims, self._position, self.rest = shape, dims, -1, 1
        self._advance()

    def _advance(self) -> None:
        while self.rest == 1 and self._position + 1 < len(self._shape):
            self._position += 1
            self.rest = self._shape[self._position]

    @property
    def done(self) -> bool:
        return self.rest == 1 and self._position + 1 >= len(self._shape)

    def take(self, size: int, dim: Dim) -> None:
        self._dims[self._position] += dim
        self.rest //= size
        self._advance()


def _reshape_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a reshape; `dimensions` is the order in which it reads dims."""
    factors = Factors()
    shape = operand_shapes(eqn)[0]
    order = _reading_order(eqn)
    read, right = reshape_dims(factors, tuple(shape[d] for d in order), result_shapes(eqn)[0])
    left: list[Dim] = [()] * len(shape)
    for d, dim in zip(order, read):
        left[d] = dim
    return factors.rule([left], [right])


def _reading_order(eqn: JaxprEqn) -> tuple[int, ...]:
    order = eqn.params.get("dimensions")
    return tuple(range(len(operand_shapes(eqn)[0]))) if order is None else tuple(order)


def _run_reshape(call: LocalCall) -> list[Array]:
    read = lax.transpose(call.operands[0], _reading_order(call.eqn))
    return [lax.reshape(read, call.result_shape(0))]


def _transpose_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    dims = factors.each(operand_shapes(eqn)[0])
    return factors.rule([dims], [[dims[d] for d in eqn.params["permutation"]]])


def _squeeze_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    dims = factors.each(operand_shapes(eqn)[0])
    dropped = {d % max(len(dims), 1) for d in eqn.params["dimensions"]}
    return factors.rule([dims], [[dim for d, dim in enumerate(dims) if d not in dropped]])


def _broadcast_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    (shape,), operands = result_shapes(eqn), operand_shapes(eqn)
    dims = factors.each(shape)
    first = [
        dims[place] if size == shape[place] else ()
        for size, place in zip(operands[0], eqn.params["broadcast_dimensions"])
    ]
    rest: list[list[Dim]] = [[()] * len(other) for other in operands[1:]]
    return factors.rule([first, *rest], [dims])


def _run_broadcast(call: LocalCall) -> list[Array]:
    places = call.eqn.params["broadcast_dimensions"]
    return [lax.broadcast_in_dim(call.operands[0], call.result_shape(0), places)]


def _tile_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a repetition: whole copies, or dims that are not repeated, are sharded."""
    factors = Factors()
    shape = operand_shapes(eqn)[0]
    dims = factors.each(shape)
    copies = [factors.new(count) for count in eqn.params["reps"]]
    return factors.rule([dims], [[copy + dim for copy, dim in zip(copies, dims, strict=True)]])


def _run_tile(call: LocalCall) -> list[Array]:
    sizes = zip(call.result_shape(0), call.operand_shape(0), strict=True)
    return call.bind(reps=tuple(made // max(held, 1) for made, held in sizes))


def _iota_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    dims = factors.each(result_shapes(eqn)[0])
    return factors.rule([[()] * len(shape) for shape in operand_shapes(eqn)], [dims])


def _run_iota(call: LocalCall) -> list[Array]:
    dtype, dim = call.eqn.params["dtype"], call.eqn.params["dimension"]
    shape = call.result_shape(0)
    counted = lax.broadcasted_iota(dtype, shape, dim)
    axes = call.result_axes(0, dim)
    if axes:
        counted = counted + call.first(axes, shape[dim]).astype(dtype)
    return [counted]


def _stack_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    dims = factors.each(operand_shapes(eqn)[0])
    axis = eqn.params["axis"]
    return factors.rule([dims] * len(eqn.invars), [[*dims[:axis], (), *dims[axis:]]])


def _unstack_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    dims = factors.each(result_shapes(eqn)[0])
    axis = eqn.params["axis"]
    return factors.rule([[*dims[:axis], (), *dims[axis:]]], [dims] * len(eqn.outvars))


def _bitcast_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a reinterpretation: a narrower type adds a minor dim, a wider drops it."""
    before, after = operand_shapes(eqn)[0], result_shapes(eqn)[0]
    factors = Factors()
    shared = factors.each(before if len(before) < len(after) else after)
    left = shared + [()] * (len(before) - len(shared))
    right = shared + [()] * (len(after) - len(shared))
    return factors.rule([left], [right])


def _empty_rule(eqn: JaxprEqn) -> ShardingRule:
    return Factors().rule([], [[()] * len(shape) for shape in result_shapes(eqn)])


def _broadcast_piece(eqn: JaxprEqn, length: int) -> Params:
    return {**eqn.params, "shape": (length, *eqn.params["shape"][1:])}


def _reshaped_piece(eqn: JaxprEqn, length: int) -> Params:
    return {**eqn.params, "new_sizes": (length, *eqn.params["new_sizes"][1:])}


_layout = functools.partial(
    Operator, linear_in=FIRST, order_survives=always, layout=True, flops=nothing
)
_alias = functools.partial(_layout, bytes=nothing, liveness="alias")
_free = functools.partial(Operator, flops=nothing, bytes=nothing)

OPERATORS = {
    "reshape": _alias(_reshape_rule, _run_reshape, piece_params=_reshaped_piece),
    "transpose": _layout(_transpose_rule, liveness="alias"),
    "squeeze": _alias(_squeeze_rule),
    "broadcast_in_dim": _layout(
        _broadcast_rule,
        _run_broadcast,
        bytes=nothing,
        liveness="fused",
        piece_params=_broadcast_piece,
    ),
    "tile": Operator(_tile_rule, _run_tile, linear_in=FIRST, flops=nothing),
    "iota": _free(_iota_rule, _run_iota, liveness="fused"),
    "stack": Operator(_stack_rule, linear_in=jointly, flops=nothing),
    "unstack": Operator(_unstack_rule, linear_in=FIRST, flops=nothing),
    "bitcast_convert_type": _free(_bitcast_rule, liveness="alias"),
    "empty": _free(_empty_rule),
    "empty2": _free(_empty_rule),
}


def permutation(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Return the dims of the operand that those of a transposition are; None of other operators."""
    return tuple(eqn.params["permutation"]) if eqn.primitive.name == "transpose" else None


def counted_dim(eqn: JaxprEqn) -> int | None:
    """Return the dim that an equation counts the places of, from 0; None if it counts nothing."""
    return int(eqn.params["dimension"]) if eqn.primitive.name == "iota" else None


def is_unspecified(eqn: JaxprEqn) -> bool:
    """Return whether the result of an equation is left unspecified, since nothing reads it."""
    return eqn.primitive.name in ("empty", "empty2")


def filled_with(eqn: JaxprEqn) -> Atom | None:
    """Return the number that an equation fills its result with, if it does nothing else."""
    fills = eqn.primitive.name == "broadcast_in_dim" and shape_of(eqn.invars[0]) == ()
    return eqn.invars[0] if fills else None
