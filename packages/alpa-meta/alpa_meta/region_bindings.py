"""What flows into and out of the bodies of a region: loops, conditionals, recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from attrs import frozen

from alpa_meta.compat import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_drop,
    open_jaxpr,
    scan_counts,
    subjaxprs,
)
from alpa_meta.operators.regions import is_conditional, is_region, is_scan, is_while


@frozen(eq=False)
class Bindings:
    """Pairs (outer, inner, shift): dim d of the inner variable is dim d + shift of the outer one.

    Carries are bound at both ends.
    """

    bodies: tuple[Jaxpr, ...]
    values: tuple[tuple[Var, Var, int], ...]


def bindings(eqn: JaxprEqn) -> Bindings | None:
    """Return the bindings of a region's equation, None if `eqn` is no region."""
    if not is_region(eqn):
        return None
    bodies = tuple(open_jaxpr(body) for _, body in subjaxprs(eqn))
    if is_while(eqn):
        pairs = _while_pairs(eqn)
    elif is_scan(eqn):
        pairs = _scan_pairs(eqn, bodies[0])
    else:
        operands = eqn.invars[1:] if is_conditional(eqn) else eqn.invars
        pairs = [
            pair
            for body in bodies
            for pair in _pairs((operands, body.invars), (eqn.outvars, body.outvars))
        ]
    values = tuple(
        (outer, inner, shift)
        for outer, inner, shift in pairs
        if _is_value(outer) and _is_value(inner)
    )
    return Bindings(bodies, values)


def trips(eqn: JaxprEqn) -> int:
    """Return how often a region's body runs; once where that is not known."""
    return int(eqn.params["length"]) if is_scan(eqn) else 1


def _scan_pairs(eqn: JaxprEqn, body: Jaxpr) -> list[tuple[Atom, Atom, int]]:
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    carries = body.invars[num_consts:first]
    outside = _pairs(
        (eqn.invars[:first], body.invars[:first]),
        (eqn.outvars[:num_carry], body.outvars[:num_carry]),
        (eqn.outvars[:num_carry], carries),
    )
    stacked = _pairs(
        (eqn.invars[first:], body.invars[first:]),
        (eqn.outvars[num_carry:], body.outvars[num_carry:]),
    )
    return [*outside, *((outer, inner, 1) for outer, inner, _ in stacked)]


def _while_pairs(eqn: JaxprEqn) -> list[tuple[Atom, Atom, int]]:
    test, body = open_jaxpr(eqn.params["cond_jaxpr"]), open_jaxpr(eqn.params["body_jaxpr"])
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carries = eqn.invars[num_test + num_body :]
    return _pairs(
        (eqn.invars[:num_test], test.invars[:num_test]),
        (carries, test.invars[num_test:]),
        (eqn.invars[num_test : num_test + num_body], body.invars[:num_body]),
        (carries, body.invars[num_body:]),
        (eqn.outvars, body.outvars),
        (eqn.outvars, body.invars[num_body:]),
    )


def _pairs(*ends: tuple[Sequence[Atom], Sequence[Atom]]) -> list[tuple[Atom, Atom, int]]:
    return [
        (outer, inner, 0)
        for outers, inners in ends
        for outer, inner in zip(outers, inners, strict=True)
    ]


def _is_value(atom: Atom) -> TypeGuard[Var]:
    return not isinstance(atom, Literal) and not is_drop(atom)
