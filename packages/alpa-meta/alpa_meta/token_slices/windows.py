"""Convolutions along the tokens, whose window reaches back from each token (and, in the backward
pass, forth), and the gradients of their kernels.

    tokens in, tokens out     out[t] = sum over j of kernel[j] x[t + j - low]: a slice's rows of x
                              with `low` before them, or `high` behind them in the backward sweep,
                              where later slices have run
    tokens in both operands   out[j] = sum over t of x[t + j - low] y[t]: a slice's rows of y with
                              the same of x; a sum over the slices
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax import lax

from alpa_meta import compat
from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.operators.convolution import spatial_places
from alpa_meta.token_slices.places import KEY, ROW, Layout, Place, whole
from alpa_meta.token_slices.reading import UnreadableError
from alpa_meta.token_slices.values import BEFORE, Value, Window

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer

_ROW = Place(ROW)


def window_of(eqn: JaxprEqn, layouts: Sequence[Layout], sweep: int) -> Window | None:
    """Return how a convolution runs whose window reaches along the tokens; None for what is none.

    Raises UnreadableError for windows that reach forth in the forward pass, or that skip tokens.
    """
    for k, (left, right, out) in enumerate(spatial_places(eqn)):
        if layouts[0][left] is None:
            continue
        if any(one not in (None, _ROW) for layout in layouts for one in layout):
            raise UnreadableError("convolves along tokens that are merged with another dim")
        low, high = eqn.params["padding"][k]
        strides = (eqn.params[name][k] for name in ("window_strides", "lhs_dilation"))
        if set(strides) != {1} or eqn.params["rhs_dilation"][k] != 1 or min(low, high) < 0:
            raise UnreadableError("convolves along the tokens with strides or holes")
        if [d for d, one in enumerate(layouts[0]) if one] != [left]:
            raise UnreadableError("convolves along another dim than the tokens'")
        sums = layouts[1][right] is not None
        tokens = shape_of(eqn.invars[0])[left]
        kept = shape_of(eqn.outvars[0])[out] == tokens and not any(layouts[1])
        if not kept and not (sums and shape_of(eqn.invars[1])[right] == tokens):
            raise UnreadableError("convolves along the tokens to another number of them")
        if high and (sums or sweep == BEFORE):
            raise UnreadableError("convolves with a window that reaches later tokens")
        if low and sweep != BEFORE and not sums:
            raise UnreadableError("convolves from earlier tokens in the backward pass")
        return Window(k, left, right, out, low, high, sums)
    return None


def results_of_window(eqn: JaxprEqn, window: Window, sweep: int) -> list[Value]:
    """Return what is known of the result."""
    rank = len(shape_of(eqn.outvars[0]))
    if window.sums:
        return [Value("known", whole(rank), sweep + 1)]
    layout = tuple(_ROW if d == window.out else None for d in range(rank))
    return [Value("sliced", layout, sweep)]


def write_window(writer: Writer, eqn: JaxprEqn, window: Window, number: int) -> None:
    """Write a slice's part of a convolution along the tokens."""
    (var,) = eqn.outvars
    start, stop = writer.slices.span(ROW, number)
    ranks = [len(shape_of(atom)) for atom in eqn.invars]
    place = KEY if window.low else ROW
    layout = tuple(Place(place) if d == window.left else None for d in range(ranks[0]))
    there = tuple(_ROW if window.sums and d == window.right else None for d in range(ranks[1]))
    values = [writer.operand(eqn.invars[1], there, number)]
    if window.high:
        values += _parts_behind(writer, eqn.invars[0], number, window.high)
    else:
        values.append(writer.operand(eqn.invars[0], layout, number))
    back = min(start, window.low)
    forth = min(writer.slices.tokens - stop, window.high)

    def run(right: Any, *parts: Any) -> list[Any]:
        left = parts[0] if len(parts) == 1 else lax.concatenate(parts, window.left)
        first = start - back if window.low else 0
        left = lax.slice_in_dim(left, first, first + back + stop - start + forth, axis=window.left)
        padding = list(eqn.params["padding"])
        padding[window.dim] = (window.low - back, window.high - forth)
        params = {**eqn.params, "padding": tuple(padding)}
        return list(compat.bind(eqn.replace(params=params), [left, right]))

    if window.sums:
        made = type(var)(var.aval)
    else:
        made = writer.result(var, writer.analysis.value(var).layout, number)
    writer.compute(object(), run, values, [made], number, eqn)
    if window.sums:
        writer.add_part(var, made, number)
    else:
        writer.parts[var, number] = made


def _parts_behind(writer: Writer, atom: Atom, number: int, reach: int) -> list[Atom]:
    """Return the parts of this slice and of those after it, as far as a window reaches."""
    found, lengths = [], writer.slices.lengths
    for later in range(number, len(lengths)):
        found.append(writer.part(atom, later))  # type: ignore[arg-type]
        if sum(lengths[number + 1 : later + 1]) >= reach:
            break
    return found
