"""What an operator makes of multiples of unknown values: m - m is 0, max(m, -inf) is m, and of
products of their powers: l / l is 1.

Values are compared as numbers: what a wider float type holds is the same, and so is what has other
dims of one element.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
from attrs import frozen

from alpa_meta.compat import Atom, JaxprEqn, dtype_of, shape_of
from alpa_meta.operators.intervals import Interval, results_of


@frozen
class Unknown:
    """A finite value that is not known, by its number. `steady`: in every iteration the same;
    `live`: it is no smaller than the score of a key that no mask leaves out; `powers`: others that
    it is a product of powers of."""

    number: int
    dtype: str
    steady: bool = False
    live: bool = False
    powers: Powers = ()


Powers = tuple[tuple[Unknown, int], ...]
"""A product of powers of unknown values, in the order of their numbers; empty: 1."""


@frozen
class Linear:
    """A number plus multiples of unknown values."""

    constant: float = 0.0
    terms: tuple[tuple[Unknown, float], ...] = ()

    @property
    def number(self) -> float | None:
        """The number that it is, if it is one."""
        return None if self.terms else self.constant

    @property
    def alone(self) -> Unknown | None:
        """The unknown value that it is, if it is one."""
        one = len(self.terms) == 1 and self.terms[0][1] == 1.0 and self.constant == 0.0
        return self.terms[0][0] if one else None

    @property
    def steady(self) -> bool:
        """Whether it is the same in every iteration."""
        return all(unknown.steady for unknown, _ in self.terms)

    def plus(self, other: Linear, factor: float = 1.0) -> Linear:
        """Return the sum with a multiple of another."""
        terms = dict(self.terms)
        for unknown, times in other.terms:
            terms[unknown] = terms.get(unknown, 0.0) + factor * times
        kept = sorted(((u, t) for u, t in terms.items() if t), key=lambda one: one[0].number)
        return Linear(self.constant + factor * other.constant, tuple(kept))


def of_linear(eqn: JaxprEqn, operands: Sequence[Linear], low: float) -> Linear | None:
    """Return what an operator makes of linear values, None if that is not one of them.

    Numbers up to `low`, which is below 0, are those of a mask.
    """
    name = eqn.primitive.name
    if name in _OF_DIMS and len(operands) == 1:
        return operands[0] if _same_elements(eqn) else None
    if name == "select_n" and operands[0].number is not None:
        return operands[1 + int(operands[0].number)]
    if any(abs(one.constant) >= -low and name not in ("max", *_COMPARED) for one in operands):
        return None
    if name in ("add", "add_any", "sub"):
        return operands[0].plus(operands[1], -1.0 if name == "sub" else 1.0)
    if name == "neg":
        return Linear().plus(operands[0], -1.0)
    if name in ("mul", "div"):
        return _scaled(name, operands)
    if name == "max":
        return _larger(operands, low)
    if name in _COMPARED:
        return _compared(eqn, operands, low)
    if name == "select_n":
        return operands[1] if len({*operands[1:]}) == 1 else None
    if name == "is_finite":
        return Linear(1.0)
    if name in ("stop_gradient", "copy", "copy_p"):
        return operands[0]
    if name == "convert_element_type":
        return _converted(eqn, operands[0])
    return None


def product_of(eqn: JaxprEqn, operands: Sequence[Linear]) -> dict[Powers, float] | None:
    """Return the multiples of products of powers that a product, quotient or power of linear values
    is; None of others. What is divided by is taken for other than 0."""
    name = eqn.primitive.name
    if any(math.isinf(one.constant) for one in operands):
        return None
    if name == "mul":
        return _multiplied(*map(_in_powers, operands))
    over = _in_powers(operands[-1])
    if name not in ("div", "integer_pow") or len(over) != 1 or 0.0 in over.values():
        return None
    ((powers, times),) = over.items()
    to = -1 if name == "div" else int(eqn.params["y"])
    raised = {tuple((one, to * power) for one, power in powers): times**to}
    return _multiplied(_in_powers(operands[0]), raised) if name == "div" else raised


def divisor_of(eqn: JaxprEqn) -> Atom | None:
    """Return what an equation divides by, None of others."""
    if eqn.primitive.name == "integer_pow":
        return eqn.invars[0] if eqn.params["y"] < 0 else None
    return eqn.invars[1] if eqn.primitive.name == "div" else None


def _in_powers(value: Linear) -> dict[Powers, float]:
    found = {one.powers or ((one, 1),): times for one, times in value.terms}
    return found if found and not value.constant else {**found, (): value.constant}


def _multiplied(one: dict[Powers, float], two: dict[Powers, float]) -> dict[Powers, float]:
    found: dict[Powers, float] = {}
    for (first, times), (second, by) in itertools.product(one.items(), two.items()):
        powers = Counter(dict(first))
        for unknown, power in second:
            powers[unknown] += power
        kept = sorted((pair for pair in powers.items() if pair[1]), key=lambda p: p[0].number)
        found[tuple(kept)] = found.get(tuple(kept), 0.0) + times * by
    return found


_OF_DIMS = frozenset(
    """
    reshape squeeze expand_dims broadcast_in_dim transpose reduce_sum reduce_max reduce_min
    """.split()
)
_COMPARED = ("eq", "ne", "ge", "gt", "le", "lt")


def _same_elements(eqn: JaxprEqn) -> bool:
    """Return whether the dims of more than one element stay what they are."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if len(eqn.invars) > 1 or [s for s in before if s > 1] != [s for s in after if s > 1]:
        return False
    moved = [d for d in eqn.params.get("permutation", ()) if before[d] > 1]
    return moved == sorted(moved)


def _scaled(name: str, operands: Sequence[Linear]) -> Linear | None:
    one, two = operands
    if name == "mul" and two.number is None:
        one, two = two, one
    factor = two.number
    if factor is None or name == "div" and factor == 0.0:
        return None
    return Linear().plus(one, factor if name == "mul" else 1.0 / factor)


def _larger(operands: Sequence[Linear], low: float) -> Linear | None:
    one, two = operands
    if one == two:
        return one
    for value, number in ((one, two.number), (two, one.number)):
        if number is None or number > low:
            continue
        if number == -math.inf or value.alone is not None and value.alone.live:
            return value
    return None


def _compared(eqn: JaxprEqn, operands: Sequence[Linear], low: float) -> Linear | None:
    one, two = operands
    masks = [abs(value.constant) >= -low for value in operands]
    if all(masks):
        return None
    if any(masks):
        number = one.constant if masks[0] else -two.constant
        difference = Interval(number, number)
    elif (apart := one.plus(two, -1.0).number) is not None:
        difference = Interval(apart, apart)
    else:
        sides = [value.alone is not None and value.alone.live for value in operands]
        if sides[0] and two.number is not None and two.number <= low / 2:
            difference = Interval(1.0, math.inf)
        elif sides[1] and one.number is not None and one.number <= low / 2:
            difference = Interval(-math.inf, -1.0)
        else:
            return None
    found = results_of(eqn, [difference, Interval(0.0, 0.0)]).constant
    return None if found is None else Linear(found)


def _converted(eqn: JaxprEqn, value: Linear) -> Linear | None:
    source, target = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    if not all(jnp.issubdtype(one, jnp.floating) for one in (source, target)):
        return None
    if jnp.promote_types(source, target) == target:
        return value
    alone = value.alone
    held = alone is not None and jnp.promote_types(alone.dtype, target) == target
    return value if held else None
