"""Whether a slice may look back on a value of the slices before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop, open_jaxpr, shape_of
from alpa_meta.token_slices.places import KEY, Layout, kinds, whole
from alpa_meta.token_slices.values import (
    BEFORE,
    Analysis,
    Branches,
    Moved,
    Running,
    Sliced,
    TokenLoop,
    Value,
    Window,
    is_joinable,
)

if TYPE_CHECKING:
    from alpa_meta.token_slices.analysis import Walk


def looks_back(walk: Walk, atom: Atom) -> bool:
    """Return whether a slice may look back on a value: one of the forward sweep, or one that is
    recomputed of such values, here or where a body is given it."""
    given = _recomputed_of(walk.found, [atom], walk.inside)
    if given is None or given and walk.parent is None:
        return False
    outer = [None if var in walk.scope.scanned else walk.scope.outer.get(var) for var in given]
    return all(
        one is not None and walk.parent is not None and looks_back(walk.parent, one)
        for one in outer
    )


def is_recomputed(walk: Walk, eqn: JaxprEqn, sweep: int) -> bool:
    """Return whether each slice may run an equation of the backward sweep on all tokens: in a body
    that recomputes it of what the forward sweep made."""
    if sweep == BEFORE or not walk.inside or walk.scope.in_blocks:
        return False
    producer, values = walk.scope.producer, walk.found.values
    pending, seen = [*eqn.invars], set[Var]()
    effects = bool(eqn.effects)
    while pending and not effects:
        one = pending.pop()
        if isinstance(one, Literal) or one in seen:
            continue
        seen.add(one)
        value = values[one]
        if one in walk.scope.outer:
            if value.state == "addend" or value.when != BEFORE or not is_joinable(value):
                return False
        elif one in producer:
            effects = bool(producer[one].effects)
            pending += producer[one].invars
        elif value.in_parts:
            return False  # handed on from one iteration to the next
    return not effects


def recomputed_values(eqn: JaxprEqn) -> list[Value]:
    """Return what is known of the results of an equation that each slice runs on all tokens."""
    return [Value("known", whole(len(shape_of(var)))) for var in eqn.outvars]


def _recomputed_of(found: Analysis, atoms: Iterable[Atom], inside: bool) -> set[Var] | None:
    """Return the inputs that values of a program are recomputed of; None if they are not.

    Only `inside` a body chunks of tokens are: elsewhere what makes them may run whole instead.
    """
    eqns = open_jaxpr(found.closed).eqns
    producer = {
        var: (eqn, k) for k, eqn in enumerate(eqns) for var in eqn.outvars if not is_drop(var)
    }
    pending, seen, given = list(atoms), set(), set()
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
                return None  # each slice kept it for its own keys
            continue
        if value.state == "addend":
            return None
        if one not in producer:
            given.add(one)
            continue
        eqn, position = producer[one]
        decision = found.decisions[position]
        if isinstance(decision, Branches):
            inner = _of_branches(decision, eqn.outvars.index(one))
            if inner is None or KEY in kinds(value.layout):
                return None
            pending += [eqn.invars[1 + k] for k in inner]
            continue
        if isinstance(decision, Sliced):
            reading = decision.reading
            pairs = zip(map(found.value, eqn.invars), reading.operands, strict=True)
            if reading.combined or not all(_read_in_place(*pair) for pair in pairs):
                return None
            layouts = [*reading.results, *reading.operands]
            if not inside and len({p.cuts for layout in layouts for p in layout if p}) > 1:
                return None
        elif isinstance(decision, Running | TokenLoop | Moved):
            if not decision.again:
                return None
        elif not isinstance(decision, Window) or decision.high:
            return None
        pending += eqn.invars
    return given


def _read_in_place(value: Value, layout: Layout) -> bool:
    """Return whether a slice reads of a value what it made, or that and what is before it."""
    pairs = zip(value.layout, layout, strict=True)
    return not value.in_parts or all(
        have is None or want is not None and have.cuts == want.cuts for have, want in pairs
    )


def _of_branches(branches: Branches, result: int) -> set[int] | None:
    """Return the numbers of the inputs that the branches recompute a result of."""
    found: set[int] = set()
    for body in branches.bodies:
        jaxpr = open_jaxpr(body.closed)
        given = _recomputed_of(body, [jaxpr.outvars[result]], True)
        if given is None:
            return None
        found |= {jaxpr.invars.index(var) for var in given}
    return found
