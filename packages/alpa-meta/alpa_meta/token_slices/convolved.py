"""Convolutions whose elements are not one for each token: of padded tokens, with holes or strides.

    out[j] = sum over i of kernel[i] x[(stride j + step i - low) / dilation], where that is whole

A slice makes the elements whose window it has, as of a slice or padding (`moves`). The gradient of
the kernel, with tokens in both operands, is a sum over the slices: each takes its rows of the right
operand and what these meet of the left one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax import Array

from alpa_meta import compat
from alpa_meta.compat import Atom, JaxprEqn, Var, dtype_of, shape_of
from alpa_meta.operators.convolution import spatial_places
from alpa_meta.token_slices.cuts import Owners
from alpa_meta.token_slices.places import ROW, Layout, Place

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer


@frozen
class Reach:
    """What elements of a result along spatial dim `number` read: see above; `taps` are those of the
    kernel."""

    number: int
    stride: int
    step: int
    low: int
    dilation: int
    taps: int

    def span(self, outs: tuple[int, int], taps: tuple[int, int]) -> tuple[int, int]:
        """Return the places [start, stop) that some elements meet with some taps."""
        first = outs[0] * self.stride + taps[0] * self.step - self.low
        last = (outs[1] - 1) * self.stride + (taps[1] - 1) * self.step - self.low
        return first, last + 1

    def elements(self, span: tuple[int, int], size: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a dim of `size` at some places."""
        first, last = (-(-place // self.dilation) for place in span)
        return min(max(first, 0), size), min(max(last, 0), size)


def reach_of(eqn: JaxprEqn, number: int) -> Reach:
    """Return the reach of a convolution along a spatial dim."""
    params, (_, right, _) = eqn.params, spatial_places(eqn)[number]
    return Reach(
        number,
        int(params["window_strides"][number]),
        int(params["rhs_dilation"][number]),
        int(params["padding"][number][0]),
        int(params["lhs_dilation"][number]),
        shape_of(eqn.invars[1])[right],
    )


def convolved_dim(eqn: JaxprEqn, layouts: Sequence[Layout]) -> int | None:
    """Return the dim of tokens along which an equation convolves what are no tokens, or to what are
    none; None for others."""
    for number, (left, _, out) in enumerate(spatial_places(eqn)):
        place, reach = layouts[0][left], reach_of(eqn, number)
        if place is None or any(layouts[1]) or left != out:
            continue
        sizes = shape_of(eqn.invars[0])[left], shape_of(eqn.outvars[0])[out]
        plain = place == Place(ROW) and reach.stride == reach.step == reach.dilation == 1
        if not (plain and sizes[0] == sizes[1]):
            return left
    return None


def _reach_along(eqn: JaxprEqn, dim: int) -> Reach:
    lefts = [left for left, _, _ in spatial_places(eqn)]
    return reach_of(eqn, lefts.index(dim))


def convolved_owners(eqn: JaxprEqn, dim: int, owners: Owners, forward: bool) -> Owners:
    """Return the slice of each element of the result, given those of the left operand."""
    reach, count = _reach_along(eqn, dim), shape_of(eqn.outvars[0])[dim]
    outs, taps = np.arange(count)[:, None], np.arange(reach.taps)[None]
    places = outs * reach.stride + taps * reach.step - reach.low
    read = places // reach.dilation
    inside = (places % reach.dilation == 0) & (read >= 0) & (read < len(owners))
    held = np.where(inside, owners[np.clip(read, 0, len(owners) - 1)], -1)
    if forward:
        found: Owners = held.max(1)
        return found
    most = np.iinfo(np.int64).max
    least = np.where(held < 0, most, held).min(1)
    found = np.where(least == most, -1, least)
    return found


def write_convolved(
    writer: Writer,
    eqn: JaxprEqn,
    dim: int,
    part: tuple[int, int],
    result: Var,
    number: int,
    taken: Callable[[Atom, int, int], Atom],
) -> None:
    """Write the elements `part` of a convolution's result."""
    source, kernel = eqn.invars
    reach = _reach_along(eqn, dim)
    span = reach.span(part, (0, reach.taps))
    start, stop = reach.elements(span, shape_of(source)[dim])
    layout = writer.analysis.value(kernel).layout
    right = writer.operand(kernel, tuple(None for _ in layout), number)
    shape, dtype = shape_of(result), dtype_of(result)
    if part[0] == part[1] or start >= stop:
        writer.compute(object(), lambda _: jnp.zeros(shape, dtype), [right], [result], number, eqn)
        return
    ends = start * reach.dilation - span[0], span[1] - ((stop - 1) * reach.dilation + 1)

    def run(left: Array, right: Array) -> Array:
        return _bound(eqn, reach.number, ends, left, right)

    writer.compute(object(), run, [taken(source, start, stop), right], [result], number, eqn)


def _bound(eqn: JaxprEqn, number: int, ends: tuple[int, int], left: Array, right: Array) -> Array:
    padding = list(eqn.params["padding"])
    padding[number] = ends
    params = {**eqn.params, "padding": tuple(padding)}
    (found,) = compat.bind(eqn.replace(params=params), [left, right])
    return found


def met_elements(eqn: JaxprEqn, number: int, rows: tuple[int, int]) -> tuple[int, int]:
    """Return the elements [start, stop) of the left operand that some rows of the right one
    meet."""
    left, _, out = spatial_places(eqn)[number]
    reach = reach_of(eqn, number)
    span = reach.span((0, shape_of(eqn.outvars[0])[out]), rows)
    return reach.elements(span, shape_of(eqn.invars[0])[left])


def write_kernel_part(
    writer: Writer,
    eqn: JaxprEqn,
    number: int,
    rows: tuple[int, int],
    operands: Sequence[Atom],
    made: Var,
    slice_number: int,
) -> None:
    """Write a slice's part of the gradient of a kernel, given what its rows meet, and the rows."""
    _, _, out = spatial_places(eqn)[number]
    reach = reach_of(eqn, number)
    span = reach.span((0, shape_of(eqn.outvars[0])[out]), rows)
    start, stop = met_elements(eqn, number, rows)
    shape, dtype = shape_of(made), dtype_of(made)

    def run(left: Array, right: Array) -> Array:
        if start >= stop:
            return jnp.zeros(shape, dtype)
        return _bound(eqn, number, (start - span[0], span[1] - stop), left, right)

    writer.compute(object(), run, operands, [made], slice_number, eqn)
