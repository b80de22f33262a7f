"""A walk over a program that applies one rewrite of a pattern (`operators.rewrites`)."""

from __future__ import annotations

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, with_eqns
from alpa_meta.operators.rewrites import Origins, Rewrite


def with_rewrite(program: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    """Return the program with every pattern of `rewrite` replaced."""
    eqns = program.jaxpr.eqns
    ends = {k for k, eqn in enumerate(eqns) if eqn.primitive.name in rewrite.ends}
    if not ends:
        return program
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    origins = Origins({var: eqn for eqn in eqns for var in eqn.outvars}, constants)
    found: list[JaxprEqn] = []
    for k, eqn in enumerate(eqns):
        replaced = rewrite.replaced(eqn, origins) if k in ends else None
        found += [eqn] if replaced is None else replaced
    return with_eqns(program, found)
