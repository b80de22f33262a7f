"""A step whose floats round otherwise: what other orders and fusions do to its results.

What another order of a float32 sum does mostly shows when inputs are changed by a rounding error.
In a step of mixed precision it does not: master parameters so changed are mostly cast to the same
bfloat16 numbers. But a compiler that fuses otherwise rounds every intermediate otherwise, and a sum
over devices adds rounded parts. Nor does it show in a result that is nothing but rounding, as the
gradient of a bias before a normalisation: an error of the mean is that of every example. So every
result narrower than some number of bits is multiplied by 1 + e, e = -eps, 0 or eps at random (Monte
Carlo arithmetic, Parker 1997), in the bodies of loops too. Where that is every float, sums and
contractions also add up from the other end: an error of their own results would be too small where
terms cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from alpa_meta import compat
from alpa_meta.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn
from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.operators.regions import with_bodies
from alpa_meta.step.trace import inline
from alpa_meta.types import Function, PyTree

NARROW, ALL = 32, 65  # floats of fewer bits are changed


def rounds(jaxpr: Jaxpr | ClosedJaxpr, bits: int) -> bool:
    """Return whether any result in `jaxpr` is a float of fewer than `bits` bits."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if any(_is_float(var.aval, bits) for var in eqn.outvars):
            return True
        if any(rounds(body, bits) for _, body in compat.subjaxprs(eqn)):
            return True
    return False


def rounded_otherwise(
    step: Function[PyTree], arguments: Sequence[PyTree], seed: int, bits: int = NARROW
) -> Function[PyTree]:
    """Return `step` with floats of fewer than `bits` bits changed by signs drawn from `seed`;
    itself if it has none."""
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    program = inline(traced)
    if not rounds(program, bits):
        return step

    @jax.jit
    def changed(*values: PyTree) -> PyTree:
        results = _run(program, jax.tree.leaves(values), _Rounding(seed, bits))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return changed


class _Rounding:
    """Changes floats of fewer than `bits` bits, each by signs of its own."""

    def __init__(self, seed: int, bits: int) -> None:
        self._seed, self._count, self.bits = seed * 2**16, 0, bits

    def __call__(self, value: jax.Array) -> jax.Array:
        if not _is_float(value, self.bits):
            return value
        self._count += 1
        info: Function[jnp.finfo] = jnp.finfo
        changed: jax.Array = value * (
            1 + _signs(value, self._seed + self._count) * info(value.dtype).eps
        )
        return changed


def _signs(value: jax.Array, number: int) -> jax.Array:
    """Return -1, 0 or 1 per element: MurmurHash3's finaliser of its place, quick to compile."""
    bits = lax.iota(jnp.uint32, value.size) + jnp.uint32(number * 0x9E3779B9 % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    signs: jax.Array = (bits % 3).astype(value.dtype) - 1
    shaped: jax.Array = signs.reshape(value.shape)
    return shaped


def _is_float(value: object, bits: int) -> bool:
    """Return whether `value` is of a float dtype of fewer than `bits` bits."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return bool(dtype.itemsize * 8 < bits)


def _run(program: ClosedJaxpr, values: Sequence[jax.Array], rounding: _Rounding) -> list[jax.Array]:
    jaxpr = compat.open_jaxpr(program)
    scope = dict(zip(jaxpr.constvars, compat.consts(program), strict=True))
    scope.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Atom) -> jax.Array:
        return atom.val if isinstance(atom, compat.Literal) else scope[atom]

    for eqn in jaxpr.eqns:
        params = with_bodies(eqn, lambda body: _changed_body(body, rounding), tests=False).params
        operands = [read(atom) for atom in eqn.invars]
        if rounding.bits == ALL:
            operands = _from_the_end(eqn, operands)
        results = compat.bind(eqn, operands, params)
        scope.update(zip(eqn.outvars, map(rounding, results), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _from_the_end(eqn: JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Return the operands of a sum or contraction with what is summed in reverse."""
    rule = sharding_rule(eqn)
    if rule is None or not operator_of(eqn).reorders:
        return operands
    added = {f.name for f in rule.factors if f.kind == "reduction" and f.reduction == "add"}
    reversed_ = [
        lax.rev(value, [d for d, names in enumerate(dims) if added.intersection(names)])
        for value, dims in zip(operands, rule.operands, strict=True)
    ]
    return list(lax.optimization_barrier(reversed_))


def _changed_body(body: compat.ClosedJaxpr, rounding: _Rounding) -> compat.ClosedJaxpr:
    """Return a body whose results are changed; the same in every trip."""
    if not rounds(body, rounding.bits):
        return body
    inputs = [var.aval for var in compat.open_jaxpr(body).invars]
    return jax.make_jaxpr(lambda *values: _run(body, values, rounding))(*inputs)
