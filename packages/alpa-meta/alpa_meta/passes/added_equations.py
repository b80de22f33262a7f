"""Equations and jaxprs made by this package: parts of a program put together, and steps added to
it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from alpa_meta.compat import Atom, Jaxpr, JaxprEqn, dtype_of, open_jaxpr, shape_of
from alpa_meta.operators.rewrites.replacement import instantiated
from alpa_meta.step.trace import inline


def equations_of(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], *told: Hashable
) -> list[Any]:
    """Return equations computing `outputs` from `inputs` (variables) by a jax function, which is
    given what it is `told` before them; one that closes over nothing is traced once for inputs of
    the same types."""
    avals = tuple((shape_of(var), dtype_of(var)) for var in inputs)
    closes = getattr(function, "__closure__", None) is not None
    made = (_traced.__wrapped__ if closes else _traced)(function, told, avals)
    return instantiated(made, inputs, outputs)


@functools.lru_cache(maxsize=1 << 10)  # a gradient is added up as those of equal layers are
def _traced(
    function: Callable[..., Any], told: tuple[Any, ...], avals: tuple[tuple[Any, Any], ...]
) -> Jaxpr:
    inputs = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals)
    made: Jaxpr = open_jaxpr(inline(jax.make_jaxpr(functools.partial(function, *told))(*inputs)))
    return made


def jaxpr_of(
    template: Any,
    constvars: list[Any],
    invars: Sequence[Atom],
    outvars: Sequence[Atom],
    eqns: list[JaxprEqn],
) -> Any:
    """Return a jaxpr of `eqns` made like `template`."""
    effects = set().union(*(eqn.effects for eqn in eqns)) if eqns else set()
    return template.replace(
        constvars=constvars,
        invars=list(invars),
        outvars=list(outvars),
        eqns=eqns,
        effects=effects,
        debug_info=template.debug_info.with_unknown_names(),
    )
