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
from typing import TYPE_CHECKING

from jax import Array, lax

from alpa_meta import compat
from alpa_meta.compat import Atom, JaxprEqn, Var, array_type, shape_of
from alpa_meta.operators.convolution import spatial_places
from alpa_meta.token_slices.convolved import met_elements, write_kernel_part
from alpa_meta.token_slices.moves import cut_along
from alpa_meta.token_slices.places import ROW, Layout, Place, whole
from alpa_meta.token_slices.reading import UnreadableError, keys_of
from alpa_meta.token_slices.sums import add_part
from alpa_meta.token_slices.values import BEFORE, Window, WindowSum

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer

_ROW = Place(ROW)


def window_of(eqn: JaxprEqn, layouts: Sequence[Layout], sweep: int) -> Window | WindowSum | None:
    """Return how a convolution runs whose window reaches along the tokens; None for what is none.

    Raises UnreadableError for windows that reach forth in the forward pass, or that skip tokens.
    """
    for k, (left, right, out) in enumerate(spatial_places(eqn)):
        if layouts[0][left] is None:
            continue
        if layouts[1][right] is not None:
            return _sum_of(eqn, layouts, k, left, right)
        if any(one not in (None, _ROW) for layout in layouts for one in layout):
            raise UnreadableError("convolves along tokens that are merged with another dim")
        low, high = eqn.params["padding"][k]
        strides = (eqn.params[name][k] for name in ("window_strides", "lhs_dilation"))
        if set(strides) != {1} or eqn.params["rhs_dilation"][k] != 1 or min(low, high) < 0:
            raise UnreadableError("convolves along the tokens with strides or holes")
        if [d for d, one in enumerate(layouts[0]) if one] != [left]:
            raise UnreadableError("convolves along another dim than the tokens'")
        if any(layouts[1]) or shape_of(eqn.outvars[0])[out] != shape_of(eqn.invars[0])[left]:
            raise UnreadableError("convolves along the tokens to another number of them")
        if high and sweep == BEFORE:
            raise UnreadableError("convolves with a window that reaches later tokens")
        return Window(k, left, out, low, high)
    return None


def _sum_of(
    eqn: JaxprEqn, layouts: Sequence[Layout], number: int, left: int, right: int
) -> WindowSum:
    """Return the gradient of a kernel, a convolution of tokens with tokens."""
    places = [place for layout in layouts for place in layout if place is not None]
    if any(place.kind != ROW or place.outer * place.inner > 1 for place in places):
        raise UnreadableError("convolves along tokens that are merged with another dim")
    if len(places) > 2 or eqn.params["lhs_dilation"][number] != 1:
        raise UnreadableError("convolves along the tokens with strides or holes")
    found = layouts[0][left], layouts[1][right]
    assert found[0] is not None and found[1] is not None
    return WindowSum(number, left, right, found[0], found[1])


def layout_of_window(eqn: JaxprEqn, window: Window) -> Layout:
    """Return where the tokens lie in the result."""
    rank = len(shape_of(eqn.outvars[0]))
    return tuple(_ROW if d == window.out else None for d in range(rank))


def write_window(writer: Writer, eqn: JaxprEqn, window: Window, number: int) -> None:
    """Write a slice's part of a convolution along the tokens."""
    (var,) = eqn.outvars
    start, _ = writer.slices.span(ROW, number)
    made = writer.result(var, layout_of_window(eqn, window), number)
    write_window_from(writer, eqn, window, made, number, start)
    writer.parts[var, number] = made


def write_window_sum(writer: Writer, eqn: JaxprEqn, window: WindowSum, number: int) -> None:
    """Write a slice's part of the gradient of a kernel."""
    (source, other), (var,) = eqn.invars, eqn.outvars
    rows = writer.slices.held(window.rows, number)
    start, stop = met_elements(eqn, window.dim, rows)
    if isinstance(source, Var) and writer.is_recomputed(source):
        keys = writer.operand(source, keys_of(writer.analysis.value(source).layout), number)
        span = (start, stop) if start < stop else (0, 0)
        held = cut_along(writer, [keys], window.left, span, 0, number)
    else:
        held = writer.stretch_of(source, window.left, start, stop, number)
    layout = tuple(window.rows if d == window.right else None for d in range(len(shape_of(other))))
    made = Var(array_type(var))
    operands = [held, writer.operand(other, layout, number)]
    write_kernel_part(writer, eqn, window.dim, rows, operands, made, number)
    add_part(writer, var, made, number)


def write_window_from(
    writer: Writer, eqn: JaxprEqn, window: Window, made: Var, number: int, start: int
) -> None:
    """Write a convolution's results from the token `start` to the last of a slice."""
    _, stop = writer.slices.span(ROW, number)
    source, kernel = eqn.invars
    back = min(start, window.low)
    forth = min(writer.slices.tokens - stop, window.high)
    if window.high:
        left = _parts_behind(writer, source, number, window.high)
        first = 0
    elif isinstance(source, Var) and writer.is_recomputed(source):
        left = [writer.operand(source, keys_of(writer.analysis.value(source).layout), number)]
        first = start - back
    else:
        left = [writer.stretch_of(source, window.left, start - back, stop, number)]
        first = 0
    values = [writer.operand(kernel, whole(len(shape_of(kernel))), number), *left]

    def run(right: Array, *parts: Array) -> list[Array]:
        joined = parts[0] if len(parts) == 1 else lax.concatenate(parts, window.left)
        size = back + stop - start + forth
        cut = lax.slice_in_dim(joined, first, first + size, axis=window.left)
        padding = list(eqn.params["padding"])
        padding[window.dim] = (window.low - back, window.high - forth)
        params = {**eqn.params, "padding": tuple(padding)}
        return list(compat.bind(eqn.replace(params=params), [cut, right]))

    writer.compute(object(), run, values, [made], number, eqn)


def _parts_behind(writer: Writer, atom: Atom, number: int, reach: int) -> list[Atom]:
    """Return the parts of this slice and of those after it, as far as a window reaches."""
    found, lengths = [], writer.slices.lengths
    for later in range(number, len(lengths)):
        found.append(writer.part(atom, later))  # type: ignore[arg-type]
        if sum(lengths[number + 1 : later + 1]) >= reach:
            break
    return found
