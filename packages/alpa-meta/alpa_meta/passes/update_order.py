"""The order of the optimiser's equations where its arrays live in the memory of the hosts.

An optimiser written over pytrees updates the first moments of all parameters, then the second ones:
all of them are on the devices at once. One parameter after another, those of one are at a time.
"""

from __future__ import annotations

from attrs import evolve

from alpa_meta.compat import JaxprEqn, Literal, Var, open_jaxpr, with_eqns
from alpa_meta.passes.flat_program import FlatProgram


def update_by_array(program: FlatProgram) -> FlatProgram:
    """Return the program with the equations of its update last, those first that the first array of
    its result needs; as it is where one has an effect or is read outside of the update."""
    jaxpr = open_jaxpr(program.closed)
    phases = program.phases
    update = [at for at, phase in enumerate(phases) if phase == "update"]
    maker: dict[Var, int] = {var: at for at in update for var in jaxpr.eqns[at].outvars}
    others = [at for at, phase in enumerate(phases) if phase != "update"]
    effects = any(jaxpr.eqns[at].effects for at in update)
    if effects or any(one in maker for at in others for one in _reads(jaxpr.eqns[at])):
        return program
    order = dict.fromkeys(others)
    results = [atom for atom in jaxpr.outvars if not isinstance(atom, Literal)]
    wanted = [maker[var] for var in results if var in maker]
    stack = [*reversed(update), *reversed(wanted)]
    while stack:
        needs = [maker[one] for one in _reads(jaxpr.eqns[stack[-1]]) if one in maker]
        missing = [at for at in needs if at not in order]
        if missing:
            stack.extend(reversed(missing))
        else:
            order.setdefault(stack.pop())
    return evolve(
        program,
        closed=with_eqns(program.closed, [jaxpr.eqns[at] for at in order]),
        phases=tuple(phases[at] for at in order),
    )


def _reads(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]
