"""Whether two values are one where row and key are the same token, such as a token's segment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from alpa_interchange import ShardingRule
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of
from alpa_meta.operators import operator_of, operator_signature, sharding_rule
from alpa_meta.operators.elementwise import is_elementwise

if TYPE_CHECKING:
    from alpa_meta.token_slices.bounds import Scope


@frozen
class Element:
    """The element of a dim that is a token's own: its number, by `step`, modulo `size`.

    Of all tokens step is 1; of blocks of c tokens it is c; of those within a block size is c.
    """

    step: int
    size: int


Labels = tuple[int | Element | None, ...]
"""Which dim of a mask each dim of a value is along, or which element of it is a token's own."""


def alike(one: tuple[Scope, Atom, Labels], two: tuple[Scope, Atom, Labels]) -> bool:
    """Return whether two values are one where row and key are the same token."""
    sides = [_source(*side) for side in (one, two)]
    if any(side is None for side in sides):
        return False
    (scope, first, labels), (other, second, others) = (side for side in sides if side is not None)
    if isinstance(first, Literal) and isinstance(second, Literal):
        return np.array_equal(first.val, second.val)
    if isinstance(first, Literal) or isinstance(second, Literal):
        return False
    if scope is other and _is_same(scope, first, second):
        return labels == others and all(_is_told(scope, label) for label in labels)
    made = [eqn for eqn in (scope.producer.get(first), other.producer.get(second)) if eqn]
    if len(made) < 2 or not all(is_elementwise(eqn) and len(eqn.outvars) == 1 for eqn in made):
        return False
    kinds_of = [(eqn.primitive, str(eqn.params), [*map(dtype_of, eqn.invars)]) for eqn in made]
    if kinds_of[0] != kinds_of[1]:
        return False
    pairs = enumerate(zip(made[0].invars, made[1].invars, strict=True))
    return all(
        alike(
            (scope, one, operand_labels(made[0], k, labels)),
            (other, two, operand_labels(made[1], k, others)),
        )
        for k, (one, two) in pairs
    )


def _is_same(scope: Scope, one: Atom, two: Atom) -> bool:
    """Return whether two values are one, or made by the same operators of the same values."""
    pending, seen = [(one, two)], set[tuple[Var, Var]]()
    while pending:
        first, second = pending.pop()
        if first is second:
            continue
        if isinstance(first, Literal) and isinstance(second, Literal):
            if first.aval != second.aval or not np.array_equal(first.val, second.val):
                return False
            continue
        if isinstance(first, Literal) or isinstance(second, Literal):
            return False
        if (first, second) in seen:
            continue
        seen.add((first, second))
        eqn, alike = scope.producer.get(first), scope.producer.get(second)
        if eqn is None or alike is None:
            return False
        if eqn.effects or operator_signature(eqn) != operator_signature(alike):
            return False
        places = (
            next(k for k, var in enumerate(one.outvars) if var is atom)
            for one, atom in ((eqn, first), (alike, second))
        )
        if len({*places}) > 1:
            return False
        pending += zip(eqn.invars, alike.invars, strict=True)
    return True


def _is_told(scope: Scope, label: int | Element | None) -> bool:
    """Return whether a label says which element it is: alone, the place within a block does not, of
    which dims are known by their size."""
    within = isinstance(label, Element) and label.step == 1 and label.size < scope.slices.tokens
    return not within


def _source(scope: Scope, atom: Atom, labels: Labels) -> tuple[Scope, Atom, Labels] | None:
    """Return the value that one is laid out of, and its labels."""
    while len(labels) == len(shape_of(atom)):
        if isinstance(atom, Literal):
            return scope, atom, labels
        eqn = scope.producer.get(atom)
        if atom in scope.outer and scope.parent is not None:
            if atom in scope.scanned:
                if scope.place is None or not scope.chunk(scope.place):
                    return None
                blocks = scope.slices.cuts_of(scope.place)[-1]
                labels = Element(scope.chunk(scope.place), blocks), *labels
            scope, atom = scope.parent, scope.outer[atom]
        elif eqn is not None and operator_of(eqn).layout and len(eqn.invars) == 1:
            labels, atom = operand_labels(eqn, 0, labels), eqn.invars[0]
        else:
            return scope, atom, labels
    return None


def operand_labels(eqn: JaxprEqn, operand: int, labels: Labels) -> Labels:
    """Return the labels of an operand, given those of the result; none if they are mixed."""
    rule = sharding_rule(eqn)
    if rule is None:
        return ()
    known: dict[str, int | Element] = {}
    for dim, label in zip(rule.results[0], labels, strict=True):
        known.update(_apart(rule, dim, label))
    held = tuple(_together([known.get(name) for name in dim]) for dim in rule.operands[operand])
    sizes = shape_of(eqn.invars[operand])
    mixed = any(size > 1 and label is None for size, label in zip(sizes, held, strict=True))
    return () if mixed else held


def _apart(
    rule: ShardingRule, dim: Sequence[str], label: int | Element | None
) -> Iterator[tuple[str, int | Element]]:
    """Yield the label of each factor of a dim."""
    if len(dim) == 1 and label is not None:
        yield dim[0], label
    elif isinstance(label, Element):
        step = label.step
        sizes = [rule.factor(name).size for name in dim]
        if math.prod(sizes) == label.size:
            for name, size in zip(reversed(dim), reversed(sizes), strict=True):
                yield name, Element(step, size)
                step *= size


def _together(labels: Sequence[int | Element | None]) -> int | Element | None:
    """Return the label of a dim of factors with these, the major ones first."""
    (*majors, found) = labels or (None,)
    for major in reversed(majors):
        if not isinstance(found, Element) or not isinstance(major, Element):
            return None
        if major.step != found.step * found.size:
            return None
        found = Element(found.step, found.size * major.size)
    return found
