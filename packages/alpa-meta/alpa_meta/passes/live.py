"""Equations that some output needs, or that have effects."""

from __future__ import annotations

from alpa_meta.compat import ClosedJaxpr, Literal, with_eqns


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without the equations that nothing needs."""
    needed = {atom for atom in program.jaxpr.outvars if not isinstance(atom, Literal)}
    kept = []
    for eqn in reversed(program.jaxpr.eqns):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return with_eqns(program, reversed(kept))
