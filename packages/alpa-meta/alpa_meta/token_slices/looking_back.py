"""Whether a slice may look back on a value of the slices before it."""

from __future__ import annotations

from alpa_meta.compat import Atom, Literal
from alpa_meta.token_slices.bounds import Scope
from alpa_meta.token_slices.places import KEY
from alpa_meta.token_slices.values import BEFORE, Analysis, Sliced


def looks_back(found: Analysis, scope: Scope, atom: Atom) -> bool:
    """Return whether a slice may look back on a value: one of the forward sweep, or one that is
    recomputed of such values row by row."""
    position = {id(eqn): k for k, eqn in enumerate(found.closed.jaxpr.eqns)}
    pending, seen = [atom], set()
    while pending:
        one = pending.pop()
        if isinstance(one, Literal) or one in seen:
            continue
        seen.add(one)
        value = found.values[one]
        if not value.in_parts or value.when == BEFORE:
            continue
        eqn = scope.producer.get(one)
        if eqn is None or value.state == "addend":
            return False
        decision = found.decisions[position[id(eqn)]]
        if not isinstance(decision, Sliced) or decision.reading.combined:
            return False
        for layout in decision.reading.operands:
            if any(place and (place.kind == KEY or place.cuts) for place in layout):
                return False
        pending += eqn.invars
    return True
