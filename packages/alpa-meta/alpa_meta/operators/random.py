"""Random bits of the whole shape, of which each device needs its part.

The default generator is counter-based: element i is a hash of the key and of i, counted row-major
over the whole shape (`jax_threefry_partitionable`), so each device hashes the positions of its own
part. Its keys are drawn from one by one, so batches of keys may be sharded. Of other generators,
and of keys made from keys, everything is drawn and the part kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry2x32_p

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, dtype_of, open_jaxpr, subjaxprs
from alpa_meta.operators.operator import (
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    result_shapes,
    run_whole,
)
from alpa_meta.operators.work import nothing, result_bytes


def _draw_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of drawing from keys [keys]: the result is [keys, drawn]."""
    (keys, *others), (shape,) = operand_shapes(eqn), result_shapes(eqn)
    factors = Factors()
    dims = factors.each(shape)
    independent = _counts(eqn) and not others
    held: list[Dim] = dims[: len(keys)] if independent else [()] * len(keys)
    rest: list[list[Dim]] = [[()] * len(other) for other in others]
    return factors.rule([held, *rest], [dims])


def _run_draw(call: LocalCall) -> list[Array]:
    (whole,) = call.bind()
    held = [dim for dim in call.rule.operands[0] if dim]
    dims = [d for d, dim in enumerate(call.rule.results[0]) if dim and dim not in held]
    return [call.own_part(whole, 0, dims)]


def _counts(eqn: JaxprEqn) -> bool:
    """Return whether an equation draws from keys of the counter-based generator."""
    return str(dtype_of(eqn.invars[0])) == "key<fry>"


def draws_alike_mapped(eqn: JaxprEqn) -> bool:
    """Return whether an equation, and all inside it, draws from each of several keys what it would
    draw from that key alone: the hardware's generator draws once for all keys."""
    keys = [str(getattr(atom.aval, "dtype", "")) for atom in eqn.invars]
    bodies = [open_jaxpr(body) for _, body in subjaxprs(eqn)]
    return not any(key.startswith("key<") and key != "key<fry>" for key in keys) and all(
        draws_alike_mapped(inner) for body in bodies for inner in body.eqns
    )


def _run_bits(call: LocalCall) -> list[Array]:
    eqn = call.eqn
    (whole,) = result_shapes(eqn)
    keys = len(operand_shapes(eqn)[0])
    drawn = whole[keys:]
    cut = any(call.result_axes(0, dim) for dim in range(keys, len(whole)))
    by_position = getattr(jax.config, "jax_threefry_partitionable", True)
    if not cut or not by_position or not _counts(eqn) or math.prod(drawn) > 1 << 32:
        return _run_draw(call)
    local = call.result_shape(0)
    low = jnp.zeros(local[keys:], jnp.uint32)
    for dim, (size, stride) in enumerate(zip(local[keys:], _strides(drawn), strict=True)):
        axes = call.result_axes(0, keys + dim)
        start = call.first(axes, size).astype(jnp.uint32) if axes else 0
        low += (lax.broadcasted_iota(jnp.uint32, low.shape, dim) + start) * np.uint32(stride)
    words = jax.random.key_data(call.operands[0])
    first, second = (jnp.expand_dims(words[..., k], range(keys, len(local))) for k in range(2))
    counters = (first, second, jnp.uint32(0), low)
    high, low = threefry2x32_p.bind(*(jnp.broadcast_to(x, local) for x in counters))
    (var,) = eqn.outvars
    if eqn.params["bit_width"] == 64:
        return [high.astype(dtype_of(var)) << 32 | low.astype(dtype_of(var))]
    return [(high ^ low).astype(dtype_of(var))]


def _strides(shape: Sequence[int]) -> list[int]:
    """Return how many elements apart neighbours along each dim are, row-major, modulo 2^32."""
    return [math.prod(shape[dim + 1 :]) % (1 << 32) for dim in range(len(shape))]


def _wrap_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of turning words into keys or back: only the dim of words stays whole."""
    before, after = operand_shapes(eqn)[0], result_shapes(eqn)[0]
    factors = Factors()
    shared = factors.each(before if len(before) < len(after) else after)
    words: Dim = ()
    return factors.rule(
        [shared + [words] * (len(before) - len(shared))],
        [shared + [words] * (len(after) - len(shared))],
    )


def _generator_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a generator with a state: (state) -> (state, bits)."""
    factors = Factors()
    state, bits = result_shapes(eqn)
    operands: list[list[Dim]] = [[()] * len(shape) for shape in operand_shapes(eqn)]
    return factors.rule(operands, [[()] * len(state), factors.each(bits)])


def _uniform_rule(eqn: JaxprEqn) -> ShardingRule:
    operands: list[list[Dim]] = [[()] * len(shape) for shape in operand_shapes(eqn)]
    return Factors().rule(operands, [[()] * len(shape) for shape in result_shapes(eqn)])


_drawn = functools.partial(Operator, bytes=result_bytes)
_alias = functools.partial(Operator, flops=nothing, bytes=nothing, liveness="alias")

OPERATORS = {
    "random_bits": _drawn(_draw_rule, _run_bits, heavy=True, liveness="words"),
    "random_split": _drawn(_draw_rule, _run_draw),
    "random_gamma": _drawn(_draw_rule, _run_draw),
    "random_wrap": _alias(_wrap_rule),
    "random_unwrap": _alias(_wrap_rule),
    "rng_bit_generator": Operator(_generator_rule, run_whole),
    "rng_uniform": Operator(_uniform_rule),
}
