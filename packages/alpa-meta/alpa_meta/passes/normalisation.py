"""What is done to the program of one microbatch before it is planned, so that any cut is exact.

markers    are removed: they have said what they are for
constants  values of the microbatches that do not depend on the batch (a key split for the next
           step, the gradient of a weight penalty) and that the update or the result needs are
           computed in the update, once per step, instead of being added up over microbatches
"""

from __future__ import annotations

from attrs import evolve

from alpa_meta.compat import Atom, ClosedJaxpr, Literal, Var, consts, is_drop, open_jaxpr
from alpa_meta.microbatch.placement import REPLICATED
from alpa_meta.passes.flat_program import FlatProgram
from alpa_meta.passes.live import live_eqns
from alpa_meta.step.phases import gradient_marker


def without_markers(program: FlatProgram) -> FlatProgram:
    """Return the program without gradient markers."""
    jaxpr = open_jaxpr(program.closed)
    renamed: dict[Var, Atom] = {}

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    eqns, kept = [], []
    for eqn, phase in zip(jaxpr.eqns, program.phases, strict=True):
        if eqn.primitive is gradient_marker:
            renamed[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
        kept.append(phase)
    outvars = [read(atom) for atom in jaxpr.outvars]
    flat = ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts(program.closed))
    return evolve(program, closed=flat, phases=tuple(kept))


def with_constants_in_update(program: FlatProgram) -> FlatProgram:
    """Return the program with batch-independent values computed in the update."""
    jaxpr, phases, placements = open_jaxpr(program.closed), program.phases, program.placements
    producer = {
        var: k
        for k, (eqn, phase) in enumerate(zip(jaxpr.eqns, phases, strict=True))
        if phase != "update" and not eqn.effects
        for var in eqn.outvars
        if not is_drop(var) and placements.get(var, REPLICATED).kind == "replicated"
    }
    wanted = [
        atom
        for eqn, phase in zip(jaxpr.eqns, phases, strict=True)
        if phase == "update"
        for atom in eqn.invars
    ]
    pending = [
        producer[atom]
        for atom in [*wanted, *jaxpr.outvars]
        if not isinstance(atom, Literal) and atom in producer
    ]
    copied: set[int] = set()
    while pending:
        k = pending.pop()
        if k not in copied:
            copied.add(k)
            read = [a for a in jaxpr.eqns[k].invars if not isinstance(a, Literal)]
            pending += [producer[atom] for atom in read if atom in producer]
    if not copied:
        return program
    fresh: dict[Var, Atom] = {}

    def again(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else fresh.get(atom, atom)

    eqns, kept = [], []
    for k, (eqn, phase) in enumerate(zip(jaxpr.eqns, phases, strict=True)):
        if phase == "update":
            eqn = eqn.replace(invars=[again(atom) for atom in eqn.invars])
        eqns.append(eqn)
        kept.append(phase)
        if k in copied:
            made = [var if is_drop(var) else Var(var.aval) for var in eqn.outvars]
            eqns.append(eqn.replace(invars=[again(atom) for atom in eqn.invars], outvars=made))
            kept.append("update")
            for var, copy in zip(eqn.outvars, made, strict=True):
                if not is_drop(var):
                    fresh[var] = copy
    outvars = [again(atom) for atom in jaxpr.outvars]
    flat = ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts(program.closed))
    return _live(evolve(program, closed=flat, phases=tuple(kept)))


def _live(program: FlatProgram) -> FlatProgram:
    """Return a program without the equations that nobody needs."""
    jaxpr = open_jaxpr(program.closed)
    live = {*live_eqns(jaxpr.eqns, [*jaxpr.outvars, *program.needed])}
    pairs = [(e, p) for e, p in zip(jaxpr.eqns, program.phases, strict=True) if e in live]
    kept = jaxpr.replace(eqns=[eqn for eqn, _ in pairs])
    phases = tuple(phase for _, phase in pairs)
    return evolve(program, closed=ClosedJaxpr(kept, consts(program.closed)), phases=phases)
