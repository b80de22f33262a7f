"""What runs along the tokens, handed on from slice to slice: running sums, and scans.

Where the backward pass recomputes one, it starts with the last slice, which no state was handed to:
each slice then runs it from the first token to its own last, as it recomputes the keys it looks
back on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import jax.numpy as jnp
from attrs import evolve
from jax import Array, lax

from alpa_meta.compat import (
    Atom,
    JaxprEqn,
    Var,
    array_type,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
)
from alpa_meta.operators.elementwise import is_sum
from alpa_meta.operators.ordering import joined
from alpa_meta.operators.regions import bodies
from alpa_meta.token_slices.parts import cut_out
from alpa_meta.token_slices.places import KEY, ROW, Layout, Slices, whole
from alpa_meta.token_slices.reading import UnreadableError, keys_of
from alpa_meta.token_slices.sums import addend
from alpa_meta.token_slices.values import BEFORE, Running, TokenLoop, Value

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer


def runs_again(reverse: bool, sweep: int) -> bool:
    """Return whether what runs along the tokens is recomputed in a sweep that runs against it."""
    if reverse and sweep == BEFORE:
        raise UnreadableError("runs from the last token to the first")
    return not reverse and sweep != BEFORE


def token_loop(
    eqn: JaxprEqn, layouts: Sequence[Layout], slices: Slices, sweep: int, read: Set[Atom] | None
) -> tuple[TokenLoop, list[Value]]:
    """Return how a scan over the tokens runs and what is known of its results.

    `read`: of one inside another loop or a recomputation, all that anything there reads.
    """
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    places = {layout[0] for layout in layouts[first:] if layout[0] is not None}
    (place, *others) = places
    if others or eqn.params["length"] != slices.cuts_of(place)[-1] or place.kind != ROW:
        raise UnreadableError("scans over tokens merged with another dim")
    again = runs_again(bool(eqn.params["reverse"]), sweep)
    wanted = []
    for k, layout in enumerate(layouts):
        inner = layout if k < first else layout[1:]
        if any(inner):
            raise UnreadableError("scans over tokens with a state that holds tokens")
        wanted.append(layout if k < first else (place, *inner))
    handed_on = {k for k in range(num_carry) if eqn.outvars[k] in (read or ())}
    sums = frozenset(k for k in handed_on if only_adds(eqn, k))
    last = frozenset(handed_on - sums)
    if again and handed_on:
        raise UnreadableError("hands on its last state in what the backward pass recomputes")
    results: list[Value] = []
    for k, var in enumerate(eqn.outvars):
        layout = whole(len(shape_of(var)))
        if k in sums or k in last:
            results.append(Value("addend", layout, sweep))
        elif k < num_carry:
            results.append(Value("known", layout, sweep + 1))
        else:
            results.append(Value("sliced", (place, *layout[1:]), sweep))
    made = tuple(one.layout for one in results)
    return TokenLoop(place, tuple(wanted), made, sums, last, again), results


def only_adds(eqn: JaxprEqn, number: int) -> bool:
    """Return whether a scan only adds to a carry, as to the gradients of what each iteration
    reads."""
    jaxpr = open_jaxpr(bodies(eqn)[0])
    held, made = jaxpr.invars[scan_counts(eqn)[0] + number], jaxpr.outvars[number]
    read = [*jaxpr.outvars, *itertools.chain(*(one.invars for one in jaxpr.eqns))]
    while held is not made:
        readers = [one for one in jaxpr.eqns if any(atom is held for atom in one.invars)]
        if len(readers) != 1 or sum(atom is held for atom in read) > 1 or not is_sum(readers[0]):
            return False
        (held,) = readers[0].outvars
    return sum(atom is made for atom in read) == 1  # or it is a running sum


def write_running(writer: Writer, eqn: JaxprEqn, decision: Running, number: int) -> None:
    """Write a running sum of a slice, which goes on from the slice before."""
    if decision.again:
        _write_again(writer, eqn, (decision.layout,), number)
        return
    (var,), layout = eqn.outvars, decision.layout
    held = writer.operand(eqn.invars[0], layout, number)
    local = writer.result(var, layout, number)
    writer.emit(eqn.replace(invars=[held], outvars=[local]), number)
    made: Atom = local
    (dim,) = (d for d, place in enumerate(layout) if place is not None)
    size = shape_of(local)[dim]
    if size and var in writer.carries:
        made = Var(local.aval)
        signature = eqn.primitive.name
        writer.compute(
            ("joined", signature),
            lambda one, before: joined(eqn, one, before),
            [local, writer.carries[var]],
            [made],
            number,
        )
    writer.parts[var, number] = made
    if size and number != writer.order(writer.sweep)[-1]:
        last = 0 if eqn.params["reverse"] else size - 1
        shape = tuple(1 if d == dim else s for d, s in enumerate(shape_of(made)))
        end = Var(array_type(made).update(shape=shape))
        writer.compute(
            ("end", dim, last),
            lambda value: lax.slice_in_dim(value, last, last + 1, axis=dim),
            [made],
            [end],
            number,
        )
        writer.carries[var] = end


def write_token_loop(writer: Writer, eqn: JaxprEqn, decision: TokenLoop, number: int) -> None:
    """Write a scan over the tokens of a slice, from the state that the slice before left."""
    if decision.again:
        _write_again(writer, eqn, decision.results, number)
        return
    num_consts, num_carry, _ = scan_counts(eqn)
    operands = [
        writer.operand(atom, layout, number)
        for atom, layout in zip(eqn.invars, decision.operands, strict=True)
    ]
    order = writer.order(writer.sweep)
    for k, var in enumerate(eqn.outvars[:num_carry]):
        if k in decision.sums:
            operands[num_consts + k] = addend(writer, eqn.invars[num_consts + k], number)
        elif number != order[0]:
            operands[num_consts + k] = writer.carries[var]
    last = number == order[-1]
    results: list[Var] = []
    for k, (var, layout) in enumerate(zip(eqn.outvars, decision.results, strict=True)):
        if k in decision.sums:
            made = Var(array_type(var))
            writer.parts[var, number] = made
        elif k < num_carry:
            own = last and k not in decision.last and not is_drop(var)
            made = var if own else Var(array_type(var))
            writer.carries[var] = made
            if own:
                writer.made.add(var)
        else:
            made = writer.result(var, layout, number)
            writer.parts[var, number] = made
        results.append(made)
    _emit_loop(writer, eqn, operands, results, number, writer.slices.held(decision.place, number))
    for k in decision.last:
        made = results[k]
        if not last:
            made = Var(array_type(made))
            writer.compute("zeros", jnp.zeros_like, [results[k]], [made], number)
        writer.parts[eqn.outvars[k], number] = made


def _emit_loop(
    writer: Writer,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    results: Sequence[Var],
    number: int,
    part: tuple[int, int],
) -> None:
    """Write a scan over a part [start, stop) of what the whole one scans over."""
    params = {**eqn.params, "length": part[1] - part[0]}
    changed = eqn.replace(invars=list(operands), outvars=list(results), params=params)
    writer.emit(changed, number)


def _write_again(writer: Writer, eqn: JaxprEqn, layouts: Sequence[Layout], number: int) -> None:
    """Write a slice's rows of what is recomputed from the first token on."""
    for var, layout in zip(eqn.outvars, layouts, strict=True):
        if not is_drop(var) and any(layout):
            writer.parts[var, number] = _own_rows(writer, var, layout, number)


def _own_rows(writer: Writer, var: Var, layout: Layout, number: int) -> Atom:
    found = writer.recomputed(var, keys_of(layout), number)
    if number == 0:
        return found
    rows, slices = writer.result(var, layout, number), writer.slices

    def cut(value: Array) -> Array:
        return cut_out(value, layout, slices, number)

    writer.compute(("cut", layout, number), cut, [found], [rows], number)
    return rows


def write_from_first(
    writer: Writer,
    eqn: JaxprEqn,
    decision: Running | TokenLoop,
    results: Sequence[Var],
    number: int,
) -> None:
    """Write what runs along the tokens from the first token to the last of a slice."""
    layouts = decision.operands if isinstance(decision, TokenLoop) else (decision.layout,)
    operands = [
        writer.operand(atom, keys_of(layout), number)
        for atom, layout in zip(eqn.invars, layouts, strict=True)
    ]
    if isinstance(decision, TokenLoop):
        part = writer.slices.held(evolve(decision.place, kind=KEY), number)
        _emit_loop(writer, eqn, operands, results, number, part)
    else:
        writer.emit(eqn.replace(invars=operands, outvars=list(results)), number)
