"""What is done to the program of one microbatch before it is planned, so that any cut is exact.

markers    are removed: they have said what they are for
literals   of the update, and literals returned, are those of the whole batch: a counter that adds
           the number of examples adds all of them
constants  values of the microbatches that do not depend on the batch (a key split for the next
           step, a schedule's value) and that the update or the result needs are computed again
           in the update, once per step, instead of being summed over microbatches
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alpa_meta.compat import ClosedJaxpr, Literal, Var, consts, is_drop, open_jaxpr
from alpa_meta.microbatch.scaling import CONSTANT, Scaling
from alpa_meta.step.phases import gradient_marker


def without_markers(closed: Any, phases: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """Return the program and its phases without gradient markers."""
    jaxpr = open_jaxpr(closed)
    renamed: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    eqns, kept = [], []
    for eqn, phase in zip(jaxpr.eqns, phases, strict=True):
        if eqn.primitive is gradient_marker:
            renamed[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
        kept.append(phase)
    outvars = [read(atom) for atom in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts(closed)), tuple(kept)


def with_whole_literals(
    closed: Any, whole: Any, phases: Sequence[str], pairs: Mapping[int, int]
) -> Any:
    """Return the program with the literals of `whole`, the step on all examples, in the update.

    `pairs` maps the position of an equation to that of the same equation in `whole`.
    """
    jaxpr, other = open_jaxpr(closed), open_jaxpr(whole)
    eqns = list(jaxpr.eqns)
    if max(pairs.values(), default=-1) >= len(other.eqns):
        return closed
    for k, phase in enumerate(phases):
        if phase == "update" and k in pairs:
            eqns[k] = _with_literals(eqns[k], other.eqns[pairs[k]])
    outvars = list(_literals_of(jaxpr.outvars, other.outvars))
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts(closed))


def _with_literals(eqn: Any, twin: Any) -> Any:
    if twin.primitive is not eqn.primitive or len(twin.invars) != len(eqn.invars):
        return eqn
    return eqn.replace(invars=list(_literals_of(eqn.invars, twin.invars)))


def _literals_of(atoms: Sequence[Any], twins: Sequence[Any]) -> Iterator[Any]:
    for atom, twin in zip(atoms, twins, strict=True):
        both = isinstance(atom, Literal) and isinstance(twin, Literal)
        yield twin if both and atom.aval.shape == twin.aval.shape else atom


def with_constants_in_update(
    closed: Any, phases: Sequence[str], scaling: dict[Any, Scaling]
) -> tuple[Any, tuple[str, ...]]:
    """Return the program and its phases with batch-independent values recomputed in the update.

    The copies' scaling is added to `scaling`.
    """
    jaxpr = open_jaxpr(closed)
    producer = {
        var: k
        for k, (eqn, phase) in enumerate(zip(jaxpr.eqns, phases, strict=True))
        if phase == "forward" and not eqn.effects
        for var in eqn.outvars
        if not is_drop(var) and scaling.get(var, CONSTANT) == CONSTANT
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
        return closed, tuple(phases)
    fresh: dict[Any, Any] = {}

    def again(atom: Any) -> Any:
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
                    scaling[copy] = CONSTANT
    outvars = [again(atom) for atom in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), consts(closed)), tuple(kept)
