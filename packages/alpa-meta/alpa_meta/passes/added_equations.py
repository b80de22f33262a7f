"""Equations and jaxprs made by this package: parts of a program put together, and steps added to
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from alpa_meta.compat import Literal, Var, open_jaxpr
from alpa_meta.step.trace import inline


def equations_of(function: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return equations computing `outputs` from `inputs` (variables) by a jax function."""
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in inputs]
    jaxpr = open_jaxpr(inline(jax.make_jaxpr(function)(*avals)))
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    computed = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    copies = []
    for atom, output in zip(jaxpr.outvars, outputs, strict=True):
        if not isinstance(atom, Literal) and atom in computed:
            env[atom] = output
        else:
            copies.append((atom, output))
    result = []
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            env.setdefault(var, Var(var.aval))
        operands = [atom if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        result.append(eqn.replace(invars=operands, outvars=[env[var] for var in eqn.outvars]))
    for atom, output in copies:
        aval = jax.ShapeDtypeStruct(output.aval.shape, output.aval.dtype)
        (copy,) = open_jaxpr(jax.make_jaxpr(lax.copy_p.bind)(aval)).eqns
        operand = atom if isinstance(atom, Literal) else env[atom]
        result.append(copy.replace(invars=[operand], outvars=[output]))
    return result


def jaxpr_of(
    template: Any,
    constvars: list[Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: list[Any],
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
