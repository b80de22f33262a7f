"""What runs along the tokens, handed on from slice to slice: running sums, and scans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import lax

from alpa_meta.compat import Atom, JaxprEqn, Var, array_type, is_drop, scan_counts, shape_of
from alpa_meta.operators.ordering import joined
from alpa_meta.token_slices.places import ROW, Layout
from alpa_meta.token_slices.values import TokenLoop

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer


def write_running(writer: Writer, eqn: JaxprEqn, layout: Layout, number: int) -> None:
    """Write a running sum of a slice, which goes on from the slice before."""
    (var,) = eqn.outvars
    held = writer.operand(eqn.invars[0], layout, number)
    local = writer.result(var, layout, number)
    writer.emit(eqn.replace(invars=[held], outvars=[local]), number)
    made: Atom = local
    (dim,) = (d for d, place in enumerate(layout) if place is not None)
    if var in writer.carries:
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
    if number != writer.order(writer.sweep)[-1]:
        size = shape_of(made)[dim]
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
    num_consts, num_carry, _ = scan_counts(eqn)
    operands = [
        writer.operand(atom, layout, number)
        for atom, layout in zip(eqn.invars, decision.operands, strict=True)
    ]
    order = writer.order(writer.sweep)
    if number != order[0]:
        handed = eqn.outvars[:num_carry]
        operands[num_consts : num_consts + num_carry] = [writer.carries[v] for v in handed]
    last = number == order[-1]
    results: list[Var] = []
    for k, (var, layout) in enumerate(zip(eqn.outvars, decision.results, strict=True)):
        if k < num_carry:
            made = var if last and not is_drop(var) else Var(array_type(var))
            writer.carries[var] = made
            if last and not is_drop(var):
                writer.made.add(var)
        else:
            made = writer.result(var, layout, number)
            writer.parts[var, number] = made
        results.append(made)
    start, stop = writer.slices.span(ROW, number)
    params = {**eqn.params, "length": stop - start}
    writer.emit(eqn.replace(invars=operands, outvars=results, params=params), number)
