"""A step whose narrow floats round otherwise: what other orders and fusions do to bfloat16.

What another order of a float32 sum does shows when inputs are changed by a rounding error. In a
step of mixed precision it does not: master parameters so changed are mostly cast to the same
bfloat16 numbers. But a compiler that fuses otherwise rounds every intermediate otherwise, and a sum
over devices adds rounded parts. So every narrow result is multiplied by 1 + e, e = -eps, 0 or eps
at random (Monte Carlo arithmetic, Parker 1997), in the bodies of loops too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_meta import compat
from alpa_meta.frontend.trace import inline

_NARROW_BITS = 32  # floats of fewer bits are narrow
_BODIES = {"scan": ("jaxpr",), "while": ("body_jaxpr",), "cond": ("branches",)}


def rounds_narrowly(jaxpr: Any) -> bool:
    """Return whether any result in `jaxpr` is a float of fewer than 32 bits."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if any(_is_narrow(var.aval) for var in eqn.outvars):
            return True
        if any(rounds_narrowly(body) for _, body in compat.subjaxprs(eqn)):
            return True
    return False


def rounded_otherwise(
    step: Callable[..., Any], arguments: Sequence[Any], seed: int
) -> Callable[..., Any]:
    """Return `step` with narrow results changed by signs drawn from `seed`; itself if it has
    none."""
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    program = inline(traced)
    if not rounds_narrowly(program):
        return step

    @jax.jit
    def changed(*values: Any) -> Any:
        results = _run(program, jax.tree.leaves(values), _Rounding(seed))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return changed


class _Rounding:
    """Changes narrow values, each by signs of its own."""

    def __init__(self, seed: int) -> None:
        self._seed, self._count = seed * 2**16, 0

    def __call__(self, value: Any) -> Any:
        if not _is_narrow(value):
            return value
        self._count += 1
        info: Any = jnp.finfo
        return value * (1 + _signs(value, self._seed + self._count) * info(value.dtype).eps)


def _signs(value: Any, number: int) -> Any:
    """Return -1, 0 or 1 per element: MurmurHash3's finaliser of its place, quick to compile."""
    bits = lax.iota(jnp.uint32, value.size) + jnp.uint32(number * 0x9E3779B9 % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    signs = (bits % 3).astype(value.dtype) - 1
    return signs.reshape(value.shape)


def _is_narrow(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return bool(dtype.itemsize * 8 < _NARROW_BITS)


def _run(program: Any, values: Sequence[Any], rounding: _Rounding) -> list[Any]:
    jaxpr = compat.open_jaxpr(program)
    scope = dict(zip(jaxpr.constvars, compat.consts(program), strict=True))
    scope.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else scope[atom]

    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        for name in ("jaxpr",) if compat.is_remat(eqn) else _BODIES.get(eqn.primitive.name, ()):
            params[name] = _changed_body(params[name], rounding)
        results = compat.bind(eqn, [read(atom) for atom in eqn.invars], params)
        scope.update(zip(eqn.outvars, map(rounding, results), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _changed_body(body: Any, rounding: _Rounding) -> Any:
    """Return a body, or several, whose narrow results are changed; the same in every trip."""
    if isinstance(body, (tuple, list)):
        return tuple(_changed_body(one, rounding) for one in body)
    if not rounds_narrowly(body):
        return body
    inputs = [var.aval for var in compat.open_jaxpr(body).invars]
    made = jax.make_jaxpr(lambda *values: _run(body, values, rounding))(*inputs)
    return made if isinstance(body, compat.ClosedJaxpr) else compat.open_jaxpr(made)
