"""Equations that some output needs, or that have effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Literal, Var, with_eqns


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without the equations that nothing needs."""
    return with_eqns(program, live_eqns(program.jaxpr.eqns, program.jaxpr.outvars))


def live_eqns(eqns: Sequence[JaxprEqn], outvars: Iterable[Var | Literal]) -> list[JaxprEqn]:
    """Return the equations that some output needs, or that have effects, in order."""
    needed = {atom for atom in outvars if not isinstance(atom, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return kept[::-1]
