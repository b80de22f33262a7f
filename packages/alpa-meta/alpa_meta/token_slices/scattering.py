"""The gradients of keys, to which every slice that looks back on them adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from attrs import evolve

from alpa_meta.compat import Atom, Var
from alpa_meta.token_slices.parts import stretch
from alpa_meta.token_slices.places import ROW, Layout

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer


def write_scattered(writer: Writer, var: Var, layout: Layout, made: Var, number: int) -> None:
    """Add a slice's gradients of keys to those of the slices before it; take its own."""
    (dim,) = (d for d, place in enumerate(layout) if place is not None)
    place = layout[dim]
    assert place is not None
    start, stop = writer.slices.held(evolve(place, kind=ROW), number)
    total: Atom = made
    if var in writer.pending:
        total = Var(made.aval)
        held, _ = writer.pending[var]
        writer.compute("add", jnp.add, [held, made], [total], number)
    own = writer.result(var, writer.analysis.value(var).layout, number)
    writer.compute(
        ("stretch", dim, place, start, stop),
        lambda value: stretch(value, dim, place, stop, start, stop),
        [total],
        [own],
        number,
    )
    writer.parts[var, number] = own
    if number:
        before = writer.result(var, layout, number - 1)
        writer.compute(
            ("stretch", dim, place, 0, start, stop),
            lambda value: stretch(value, dim, place, stop, 0, start),
            [total],
            [before],
            number,
        )
        writer.pending[var] = before, number
