"""Sums over the slices, and other combinations of their parts, one slice after another.

In a loop or a recomputation a sum stays in parts (an "addend"): each slice has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, array_type, is_drop, shape_of
from alpa_meta.identity import Identity
from alpa_meta.token_slices.places import whole

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer

_COMBINE = {
    "add": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "or": jnp.bitwise_or,
    "and": jnp.bitwise_and,
}


def add_part(writer: Writer, var: Var, made: Atom, number: int, combined: str = "add") -> None:
    """Add a slice's part to a sum over the slices, or keep it where sums stay in parts."""
    if writer.analysis.value(var).state == "addend":
        writer.parts[var, number] = made
        return
    if var not in writer.sums:
        writer.sums[var] = made
        if writer.slices.count == 1:
            writer.compute("same", lambda value: value, [made], [var], number)
            writer.made.add(var)
        return
    last = number == writer.order(writer.sweep)[-1]
    total = var if last else Var(var.aval)
    writer.compute(combined, _COMBINE[combined], [writer.sums[var], made], [total], number)
    writer.sums[var] = total
    if last:
        writer.made.add(var)


def addend(writer: Writer, atom: Atom, number: int) -> Atom:
    """Return a slice's part of a sum: of a known one the first slice has it, others zeros."""
    value = writer.analysis.value(atom)
    if value.state == "addend":
        assert isinstance(atom, Var)
        return writer.part(atom, number)
    held = (
        atom if isinstance(atom, Literal) else writer.known(atom, whole(len(value.layout)), number)
    )
    if number == writer.order(writer.sweep)[0]:
        return held

    def zeros() -> Atom:
        zero = Var(array_type(atom))
        writer.compute("zeros", jnp.zeros_like, [held], [zero], number)
        return zero

    return writer.once(("zero", Identity(atom), writer.sweep, number), zeros)


def write_of_parts(writer: Writer, eqn: JaxprEqn, group: Sequence[int], number: int) -> None:
    """Write an operator that is linear in parts of sums, on a slice's parts."""
    operands = [
        addend(writer, atom, number)
        if k in group
        else writer.operand(atom, whole(len(shape_of(atom))), number)
        for k, atom in enumerate(eqn.invars)
    ]
    results = [var if is_drop(var) else Var(var.aval) for var in eqn.outvars]
    writer.emit(eqn.replace(invars=operands, outvars=results), number)
    for var, made in zip(eqn.outvars, results, strict=True):
        if not is_drop(var):
            writer.parts[var, number] = made
