"""Whether a slice may look back on a value of the slices before it."""

from __future__ import annotations

from alpa_meta.compat import Atom, Literal
from alpa_meta.token_slices.bounds import Scope
from alpa_meta.token_slices.places import KEY, kinds
from alpa_meta.token_slices.values import (
    BEFORE,
    Analysis,
    Moved,
    Running,
    Sliced,
    TokenLoop,
    Window,
)


def looks_back(found: Analysis, scope: Scope, atom: Atom) -> bool:
    """Return whether a slice may look back on a value: one of the forward sweep, or one that is
    recomputed of such values."""
    position = {id(eqn): k for k, eqn in enumerate(found.closed.jaxpr.eqns)}
    pending, seen = [atom], set()
    while pending:
        one = pending.pop()
        if isinstance(one, Literal) or one in seen:
            continue
        seen.add(one)
        value = found.values[one]
        if not value.in_parts:
            continue
        if value.when == BEFORE:
            if KEY in kinds(value.layout):
                return False  # each slice kept it for its own keys
            continue
        eqn = scope.producer.get(one)
        if eqn is None or value.state == "addend":
            return False
        decision = found.decisions[position[id(eqn)]]
        if isinstance(decision, Sliced):
            reading = decision.reading
            held = [found.value(atom) for atom in eqn.invars]
            layouts = [*reading.results, *(value.layout for value in held if value.in_parts)]
            cuts = {place.cuts for layout in layouts for place in layout if place}
            if reading.combined or len(cuts) > 1:
                return False
        elif isinstance(decision, Running | TokenLoop | Moved):
            if not decision.again:
                return False
        elif not isinstance(decision, Window) or decision.high:
            return False
        pending += eqn.invars
    return True
