"""Operators that combine elements along some dims: sums, extremes, products, places of them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, dtype_of
from alpa_meta.operators.operator import (
    FIRST,
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    same_params,
)
from alpa_meta.operators.work import operand_elements
from alpa_meta.types import DType

_COMBINATIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}

_UNMAPPED = {"unvmap_any": "or", "unvmap_all": "and", "unvmap_max": "max"}


def _unmapped_rule(eqn: JaxprEqn) -> ShardingRule:
    factors = Factors()
    combination = _UNMAPPED[eqn.primitive.name]
    dims = [factors.new(s, "reduction", reduction=combination) for s in operand_shapes(eqn)[0]]
    return factors.rule([dims], [()])


def _reduce_rule(eqn: JaxprEqn) -> ShardingRule | None:
    combination = _COMBINATIONS[eqn.primitive.name]
    if combination in ("and", "or") and str(dtype_of(eqn.invars[0])) != "bool":
        return _along_rule(eqn, "replicate")
    axes = set(eqn.params["axes"])
    factors = Factors()
    dims = [
        factors.new(size, "reduction", reduction=combination) if d in axes else factors.new(size)
        for d, size in enumerate(operand_shapes(eqn)[0])
    ]
    return factors.rule([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])


def _run_reduce(call: LocalCall) -> list[Array]:
    return call.bind(out_sharding=None) if "out_sharding" in call.eqn.params else call.bind()


def _along_rule(eqn: JaxprEqn, kind: str) -> ShardingRule:
    """Return the rule of a reduction whose reduced dims are factors of `kind`, or stay whole."""
    axes = set(eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"])
    factors = Factors()
    dims: list[Dim] = [
        (factors.new(size, kind) if kind != "replicate" else ()) if d in axes else factors.new(size)
        for d, size in enumerate(operand_shapes(eqn)[0])
    ]
    operands = [
        dims if len(shape) == len(dims) else [()] * len(shape) for shape in operand_shapes(eqn)
    ]
    result = [dim for d, dim in enumerate(dims) if d not in axes]
    return factors.rule(operands, [result] * len(eqn.outvars))


def _generic_rule(eqn: JaxprEqn) -> ShardingRule:
    return _along_rule(eqn, "replicate")


def _product_rule(eqn: JaxprEqn) -> ShardingRule:
    return _along_rule(eqn, "permutation")


def _run_product(call: LocalCall) -> list[Array]:
    (local,) = call.bind()
    axes = _reduced_axes(call)
    if not axes:
        return [local]
    gathered = call.collectives.all_gather(local[None], axes, 0, "factors of a product")
    return call.bind([gathered], axes=(0,))


def _run_place(call: LocalCall) -> list[Array]:
    """Return argmax or argmin over a sharded dim: the best of the devices' (value, place) pairs."""
    (place,) = call.bind()
    axes = _reduced_axes(call)
    if not axes:
        return [place]
    (dim,) = call.eqn.params["axes"]
    source = call.operands[0]
    value = jnp.squeeze(jnp.take_along_axis(source, jnp.expand_dims(place, dim), dim), dim)
    offset = (call.index(axes) * source.shape[dim]).astype(place.dtype)
    reason = "values of an arg-reduction"
    values = call.collectives.all_gather(value[None], axes, 0, reason)
    places = call.collectives.all_gather((place + offset)[None], axes, 0, reason)
    search = lax.argmax if call.eqn.primitive.name == "argmax" else lax.argmin
    best = search(values, 0, jnp.int32)
    return [jnp.take_along_axis(places, best[None], 0)[0]]


def _reduced_axes(call: LocalCall) -> tuple[str, ...]:
    return tuple(axis for d in call.eqn.params["axes"] for axis in call.operand_axes(0, d))


def _place_rule(eqn: JaxprEqn) -> ShardingRule:
    return _along_rule(eqn, "permutation" if len(eqn.params["axes"]) == 1 else "replicate")


def extreme(dtype: DType, *, lowest: bool) -> float:
    """Return the lowest or the highest value of `dtype`, which max or min leave as they are."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf if lowest else np.inf
    if dtype == np.bool_:
        return not lowest
    info = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return info.min if lowest else info.max


_combined = functools.partial(Operator, flops=operand_elements(0), liveness="reduced")
_placed = functools.partial(Operator, flops=operand_elements(0))

OPERATORS = (
    {name: _combined(_reduce_rule, _run_reduce, piece_params=same_params) for name in _COMBINATIONS}
    | {
        "reduce_sum": _combined(
            _reduce_rule, _run_reduce, linear_in=FIRST, piece_params=same_params, reorders=True
        ),
        "reduce_xor": _combined(_generic_rule, _run_reduce),
        "reduce_prod": _combined(_product_rule, _run_product),
        "argmax": _placed(_place_rule, _run_place),
        "argmin": _placed(_place_rule, _run_place),
        "reduce": Operator(_generic_rule),
    }
    | {
        # Equinox: over the dims of jax.vmap too, for conditions of loops and of error checks.
        name: _combined(_unmapped_rule, steers=True)
        for name in _UNMAPPED
    }
)


def is_any(eqn: JaxprEqn) -> bool:
    """Return whether an equation says if any of some truth values holds."""
    return bool(eqn.primitive.name == "reduce_or")
