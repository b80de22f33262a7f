"""Numbers that a loop counts: an integer plus a multiple of the number of the iteration."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of, subjaxprs
from alpa_meta.operators.elementwise import is_elementwise
from alpa_meta.operators.intervals import Interval, holds_exactly, results_of
from alpa_meta.operators.layout import counted_dim
from alpa_meta.operators.registry import operator_of
from alpa_meta.operators.rewrites.rewrite import Origins


def is_by_element(one: JaxprEqn) -> bool:
    """Return whether an operator acts on each element alone, lays elements out or counts them."""
    return is_elementwise(one) or operator_of(one).layout or counted_dim(one) is not None


def is_integer(atom: Atom) -> bool:
    """Return whether a value is of integers or truth values."""
    dtype = dtype_of(atom)
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.integer))


def counts(atom: Atom, origins: Origins) -> Interval | None:
    """Return what an array of numbers counts: a number plus a multiple of the place in it."""
    if len(shape_of(atom)) != 1 or isinstance(atom, Literal):
        return None
    value = origins.constant(atom)
    if value is not None:
        steps = np.unique(np.diff(np.asarray(value)))
        begin = float(np.asarray(value)[0]) if len(value) else 0.0
        return Interval(begin, begin, float(steps[0]), len(value) - 1) if steps.size == 1 else None
    one = origins.eqn(atom)
    if one is not None and one.primitive.name == "iota":
        last = shape_of(atom)[0] - 1
        return Interval(0.0, 0.0, 1.0, last) if holds_exactly(dtype_of(atom), last) else None
    if one is None:
        return None
    if operator_of(one).layout and isinstance(one.invars[0], Literal) and is_integer(atom):
        return Interval(float(one.invars[0].val), float(one.invars[0].val))
    known = {a: held for a in one.invars if isinstance(a, Var) and (held := counts(a, origins))}
    return result_of_numbers(one, known)


def result_of_numbers(one: JaxprEqn, known: dict[Var, Interval]) -> Interval | None:
    """Return what an equation makes of numbers that are known, if that is one for each
    iteration."""
    atoms = (*one.invars, *one.outvars)
    in_place = is_elementwise(one) or all(shape_of(atom) == () for atom in atoms)
    plain = len(one.outvars) == 1 and not subjaxprs(one) and not one.effects
    if not (in_place and plain and all(map(is_integer, atoms))):
        return None
    operands = []
    for atom in one.invars:
        if isinstance(atom, Literal) and shape_of(atom) == ():
            operands.append(Interval(float(atom.val), float(atom.val)))
        elif isinstance(atom, Var) and atom in known:
            operands.append(known[atom])
        else:
            return None
    found = results_of(one, operands) if operands else None
    if found is None or found.low != found.high or found.blocks or abs(found.low) >= 2**53:
        return None
    return found


def counted(held: Interval, var: Var) -> Callable[[], jax.Array]:
    """Return a function that makes the array `var` of numbers."""
    dtype, size = dtype_of(var), shape_of(var)[0]

    def run() -> jax.Array:
        numbers = lax.iota(dtype, size)
        if held.slope != 1.0:
            numbers = lax.mul(numbers, lax.full_like(numbers, held.slope))
        return lax.add(numbers, lax.full_like(numbers, held.low)) if held.low else numbers

    return run
