"""Reductions over a named axis of `jax.vmap`, which leaves them as collectives of one device.

`jax.vmap(f, axis_name="batch")` makes `lax.psum(x, "batch")` of f a psum over dims of the mapped
array (equinox' BatchNorm is written so), or over none where x is not mapped. They are written as
the reductions that they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax import lax

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, with_eqns
from alpa_meta.passes.replacement import replacement

_REDUCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
)


def without_mapped_reductions(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with reductions over mapped dims as ordinary ones."""
    return with_eqns(program, _ordinary(program.jaxpr.eqns))


def _ordinary(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        axes = eqn.params.get("axes") if eqn.primitive.name in _REDUCTIONS else None
        if axes is None or not all(isinstance(axis, int) for axis in axes):
            yield eqn
            continue
        reduce = functools.partial(_REDUCTIONS[eqn.primitive.name], axes=axes)
        for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
            yield from replacement(reduce, [operand], [result], eqn)
