"""Whether a slice may look back on a value of the slices before it."""

from __future__ import annotations

from alpa_meta.compat import Atom, Literal
from alpa_meta.token_slices.bounds import Scope
from alpa_meta.token_slices.places import KEY
from alpa_meta.token_slices.values import BEFORE, Analysis, Running, Sliced, TokenLoop, Window


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
        if isinstance(decision, Sliced):
            if not _keeps_rows(decision):
                return False
        elif isinstance(decision, Running | TokenLoop):
            if not decision.again:
                return False
        elif not isinstance(decision, Window) or decision.high or decision.sums:
            return False
        pending += eqn.invars
    return True


def _keeps_rows(decision: Sliced) -> bool:
    """Return whether an operator makes each row of the same row of its operands."""
    places = (place for layout in decision.reading.operands for place in layout if place)
    return not decision.reading.combined and not any(p.kind == KEY or p.cuts for p in places)
