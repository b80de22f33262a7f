"""Equations and jaxprs made by this package: parts of a program put together, and steps added to
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from alpa_meta.compat import Atom, JaxprEqn, dtype_of, open_jaxpr, shape_of
from alpa_meta.operators.rewrites.replacement import instantiated
from alpa_meta.step.trace import inline


def equations_of(function: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return equations computing `outputs` from `inputs` (variables) by a jax function."""
    avals = [jax.ShapeDtypeStruct(shape_of(var), dtype_of(var)) for var in inputs]
    return instantiated(open_jaxpr(inline(jax.make_jaxpr(function)(*avals))), inputs, outputs)


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
