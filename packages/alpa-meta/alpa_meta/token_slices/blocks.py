"""Loops over blocks of tokens that look back on all tokens before: attention by blocks of queries.

    out[i] = f(block i of the queries, all keys, i)      `jax.lax.map`, `lax.scan`

Each slice runs the loop over its own blocks, of the keys up to its end. Inside, the blocks are no
tokens any more, and what is read of all tokens are keys. The backward loop adds to the gradients of
the keys, to which all slices that look back on them add; other carries are handed on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from attrs import evolve

from alpa_meta.compat import (
    Atom,
    JaxprEqn,
    Var,
    array_type,
    dtype_of,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
)
from alpa_meta.operators.regions import bodies
from alpa_meta.token_slices.bounds import After
from alpa_meta.token_slices.places import KEY, ROW, Layout, kinds, whole
from alpa_meta.token_slices.reading import UnreadableError, keys_of
from alpa_meta.token_slices.recurrences import only_adds
from alpa_meta.token_slices.regions import BodyWriter
from alpa_meta.token_slices.scattering import write_scattered
from alpa_meta.token_slices.sums import add_part, addend
from alpa_meta.token_slices.values import BEFORE, Blocks, Region, Value
from alpa_meta.token_slices.writer import Writer

if TYPE_CHECKING:
    from alpa_meta.token_slices.analysis import Walk

_REASON = "scans over tokens with a state that holds tokens"


def block_loop(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Value], layouts: Sequence[Layout], sweep: int
) -> tuple[Blocks, list[Value]]:
    """Return how a loop over blocks of tokens runs in slices, and its results."""
    num_consts, num_carry, _ = scan_counts(eqn)
    first = num_consts + num_carry
    (place, *others) = {layout[0] for layout in layouts[first:] if layout[0] is not None}
    assert place is not None
    if others or eqn.params["length"] != walk.slices.cuts_of(place)[-1] or place.kind != ROW:
        raise UnreadableError("scans over tokens merged with another dim")
    carried = range(num_consts, first)
    sums = frozenset(k for k in range(num_carry) if only_adds(eqn, k))
    in_order = bool(eqn.params["reverse"]) == (sweep != BEFORE)
    if len(sums) < num_carry and not in_order:
        raise UnreadableError("runs blocks of tokens against the order of the slices")
    pairs = zip(eqn.invars[:num_consts], operands)
    inputs = [_given(walk, atom, value, sweep) for atom, value in pairs]
    for k, (value, layout) in enumerate(zip(operands[num_consts:first], layouts[num_consts:first])):
        if any(layout) or value.in_parts:
            raise UnreadableError(_REASON)
        inputs.append(Value("sliced", layout, sweep, rest=0.0 if k in sums else None))
    for value, layout in zip(operands[first:], layouts[first:], strict=True):
        if ROW in kinds(layout[1:]):
            raise UnreadableError(_REASON)
        piece = evolve(value, layout=layout[1:], longer=None)
        inputs.append(piece if value.in_parts else evolve(piece, layout=whole(len(layout) - 1)))
    jaxpr = open_jaxpr(bodies(eqn)[0])
    outer = {v: eqn.invars[k] for k, v in enumerate(jaxpr.invars) if k not in carried}
    while True:
        found = walk.body(eqn, 0, inputs, outer, sweep, carried, place).found
        after = [found.value(atom) for atom in jaxpr.outvars]
        again = [*inputs]
        for k in sums:
            again[num_consts + k] = evolve(inputs[num_consts + k], layout=after[k].layout)
        if again == inputs:
            break
        inputs = again
    results = []
    for k, (var, value) in enumerate(zip(eqn.outvars, after, strict=True)):
        if value.state == "addend" or ROW in kinds(value.layout):
            raise UnreadableError(_REASON)
        if k >= num_carry:
            rest = value.rest if value.in_parts else None
            layout = (place, *(value.layout if value.in_parts else whole(len(value.layout))))
            later = value.later if value.in_parts else None
            results.append(Value("sliced", layout, sweep, rest=rest, dead=value.dead, later=later))
        elif k in sums and KEY in kinds(value.layout):
            _check_sum(walk, eqn.invars[num_consts + k], value, sweep)
            layout = tuple(one and evolve(one, kind=ROW) for one in value.layout)
            results.append(Value("sliced", layout, sweep))
        elif k not in sums and (any(value.layout) or walk.inside and var in walk.read):
            raise UnreadableError(_REASON)
        else:
            state, when = ("addend", sweep) if walk.inside else ("known", sweep + 1)
            results.append(Value(state, whole(len(value.layout)), when))
    return Blocks(found, num_consts, num_carry, place, sums), results


def _given(walk: Walk, atom: Atom, value: Value, sweep: int) -> Value:
    """Return what a body is given of a value that every iteration reads."""
    if not value.in_parts:
        return evolve(value, layout=whole(len(value.layout)), longer=None)
    if KEY in kinds(value.layout):
        raise UnreadableError(_REASON)
    layout = keys_of(value.layout)
    if any(place and place.outer > 1 for place in layout):
        raise UnreadableError(_REASON)
    if any(layout):
        walk.check_read(atom, value, layout, sweep)
    return evolve(value, layout=layout, rest=None, longer=None)


def _check_sum(walk: Walk, start: Atom, value: Value, sweep: int) -> None:
    """Raise UnreadableError unless a loop adds to the gradients of keys, from 0 on, and not to
    those of later tokens."""
    if sweep == BEFORE:
        raise UnreadableError("gives later tokens a part in earlier ones")
    if len([place for place in value.layout if place is not None]) > 1:
        raise UnreadableError(_REASON)
    begin = walk.scope.bounds(start, whole(len(shape_of(start))), After(0)).constant
    if walk.slices.count > 1 and value.rest != 0.0 or begin != 0.0:
        raise UnreadableError(
            "adds to the gradients of tokens after its own, which no mask was proved to leave out"
        )


class _BlockWriter(BodyWriter):
    """Writes the loops of all slices over their blocks."""

    def __init__(self, parent: Writer, eqn: JaxprEqn, blocks: Blocks) -> None:
        self.blocks = blocks
        self._handed_on: dict[tuple[int, int], Var] = {}
        region = Region(blocks.body, blocks.num_consts, blocks.num_carry, True)
        super().__init__(parent, eqn, region)

    def outer_layout(self, var: Var, layout: Layout) -> Layout:
        """Return the layout outside of what a body reads."""
        return (self.blocks.place, *layout) if var in self.from_scan else layout

    def value_of(self, k: int) -> Value:
        """Return what is known of a result of the body: all of them are of a slice."""
        if k < self.blocks.num_carry:
            return super().value_of(k)
        value = super().value_of(k)
        layout = value.layout if value.in_parts else whole(len(value.layout))
        return Value("sliced", layout)

    def outside(self, k: int, number: int) -> Var | None:
        """Return the variable outside for a result of a slice's loop."""
        var, value = self.eqn.outvars[k], self.value_of(k)
        if k >= self.blocks.num_carry:
            made = self.parent.result(var, (self.blocks.place, *value.layout), number)
            if not is_drop(var):
                self.parent.parts[var, number] = made
            return made
        if k in self.blocks.sums:
            made = self.parent.result(var, value.layout, number)
            if not is_drop(var):
                self.sums_made.append((var, made, number))
            return made
        last = number == self.parent.order(self.sweep)[-1] and not is_drop(var)
        made = var if last else Var(array_type(var))
        self._handed_on[k, number] = made
        if last:
            self.parent.made.add(var)
        return made

    def carry_in(self, k: int, number: int) -> Atom:
        """Return what a slice's loop starts a carry from."""
        atom, value = self.eqn.invars[self.blocks.num_consts + k], self.value_of(k)
        if k not in self.blocks.sums:
            order = self.parent.order(self.sweep)
            if number != order[0]:
                return self._handed_on[k, order[order.index(number) - 1]]
            return self.parent.operand(atom, value.layout, number)
        if not any(value.layout):
            return addend(self.parent, atom, number)
        made = self.parent.result(self.carries_in[k], value.layout, number)
        shape, dtype = shape_of(made), dtype_of(made)
        key: Hashable = "zeros", shape, dtype
        self.parent.compute(key, lambda: jnp.zeros(shape, dtype), [], [made], number)
        return made

    def add_up(self, var: Var, made: Var, number: int) -> None:
        """Add a slice's part of a carry that the loop adds to."""
        layout = self.value_of(self.eqn.outvars.index(var)).layout
        if any(layout):
            write_scattered(self.parent, var, layout, made, number)
        else:
            add_part(self.parent, var, made, number)

    def loop(self, number: int) -> JaxprEqn:
        """Return the loop over a slice's blocks."""
        start, stop = self.slices.held(self.blocks.place, number)
        eqn: JaxprEqn = self.eqn.replace(params={**self.eqn.params, "length": stop - start})
        return eqn


def write_blocks(parent: Writer, eqn: JaxprEqn, blocks: Blocks) -> None:
    """Write a loop over blocks of tokens for all slices."""
    writer = _BlockWriter(parent, eqn, blocks)
    writer.write()
    writer.finish()
