"""Reductions over a named axis of `jax.vmap`, which leaves them as collectives of one device.

`jax.vmap(f, axis_name="batch")` makes `lax.psum(x, "batch")` of f a psum over dims of the mapped
array (equinox' BatchNorm is written so), or over none where x is not mapped. They are written as
the reductions that they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from jax import Array, lax

from alpa_meta.compat import JaxprEqn
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite
from alpa_meta.types import Function

_REDUCTIONS: Mapping[str, Function[Array]] = MappingProxyType(
    {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
)


def _ordinary(eqn: JaxprEqn, _: Origins) -> list[JaxprEqn] | None:
    axes = eqn.params.get("axes")
    if axes is None or not all(isinstance(axis, int) for axis in axes):
        return None
    reduce = functools.partial(_REDUCTIONS[eqn.primitive.name], axes=axes)
    found = []
    for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
        found += replacement(reduce, [operand], [result], eqn)
    return found


MAPPED_REDUCTIONS = Rewrite(frozenset(_REDUCTIONS), _ordinary)
