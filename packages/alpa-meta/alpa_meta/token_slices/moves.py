"""Slices, paddings, concatenations and splits along the tokens, as in an associative scan's tree, a
shift by one token or a convolution by hand: which elements a slice makes, and of what. So do
convolutions of other elements than tokens (`convolved`).

    slice        out[j] = in[start + stride j]
    pad          out[low + (1 + interior) j] = in[j], the padding elsewhere
    concatenate  the operands one behind the other; split undoes it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax import Array, lax

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, array_type, is_drop, shape_of
from alpa_meta.operators import operator_of
from alpa_meta.operators.cutting import rearrangement
from alpa_meta.token_slices.convolved import convolved_dim, convolved_owners, write_convolved
from alpa_meta.token_slices.cuts import Cutting, Owners, cuts_of, owners_of
from alpa_meta.token_slices.places import KEY, ROW, Layout, Place, whole
from alpa_meta.token_slices.reading import UnreadableError, keys_of
from alpa_meta.token_slices.values import Moved, OneToken, Value

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer


def moved_dim(eqn: JaxprEqn, layouts: Sequence[Layout]) -> int | None:
    """Return the dim of tokens that an equation moves them along; None if it moves none."""
    if rearrangement(eqn) is None:
        return convolved_dim(eqn, layouts)
    dims = {d for layout in layouts for d, place in enumerate(layout) if place is not None}
    moved = [d for d in dims if _is_moved(eqn, d)]
    return moved[0] if moved else None


def _is_moved(eqn: JaxprEqn, dim: int) -> bool:
    params, kind = eqn.params, rearrangement(eqn)
    if kind == "part":
        whole = params["start_indices"][dim] == 0 and _stride(eqn, dim) == 1
        return not whole or params["limit_indices"][dim] != shape_of(eqn.invars[0])[dim]
    if kind == "padded":
        return tuple(map(int, params["padding_config"][dim])) != (0, 0, 0)
    return bool(params["dimension" if kind == "joined" else "axis"] == dim)


def _stride(eqn: JaxprEqn, dim: int) -> int:
    strides = eqn.params["strides"]
    return 1 if strides is None else int(strides[dim])


def moved(
    eqn: JaxprEqn, dim: int, operands: Sequence[Value], cutting: Cutting, sweep: int
) -> tuple[Moved, list[Value]]:
    """Return how an equation moves tokens along a dim, and what is known of its results."""
    for value in operands:
        others = [place for d, place in enumerate(value.layout) if place and d != dim]
        place = value.layout[dim] if value.in_parts and value.layout else None
        if value.in_parts and others or place not in (None, Place(ROW)) and not place.cuts:
            raise UnreadableError("cuts, joins or reorders the dim of tokens")
        if place is not None and (place.kind != ROW or place.outer * place.inner > 1):
            raise UnreadableError("cuts, joins or reorders the dim of tokens")
    pieces = [_owners(atom, value, dim, cutting) for atom, value in zip(eqn.invars, operands)]
    free = [not value.in_parts or value.when < sweep for value in operands]
    if not all(one for one, value in zip(free, operands) if value.in_parts):
        pieces = [np.full_like(p, -1) if f else p for p, f in zip(pieces, free, strict=True)]
    places, results = [], []
    moved_owners = _moved_owners(eqn, dim, pieces, cutting.forward)
    for owners, var in zip(moved_owners, eqn.outvars, strict=True):
        cuts = cuts_of(owners, cutting.forward, cutting.slices.count)
        place = cutting.settled(Place(ROW, cuts=cuts))
        if rearrangement(eqn) is None and cutting.forward and len(owners) == cutting.slices.tokens:
            if place.cuts:
                raise UnreadableError("convolves with a window that reaches later tokens")
        layout = layout_of_moved(var, dim, place)
        places.append(place)
        results.append(Value("sliced", layout, sweep))
    return Moved(dim, tuple(places)), results


def _owners(atom: Atom, value: Value, dim: int, cutting: Cutting) -> Owners:
    sizes = shape_of(atom)
    place = value.layout[dim] if sizes else None
    if not value.in_parts or place is None:
        return np.full(sizes[dim] if sizes else 1, -1)
    return owners_of(cutting.slices.cuts_of(place))


def _moved_owners(eqn: JaxprEqn, dim: int, pieces: Sequence[Owners], forward: bool) -> list[Owners]:
    """Return the slice of each element of the results, given those of the operands."""
    kind, params = rearrangement(eqn), eqn.params
    if kind == "part":
        start, stop = params["start_indices"][dim], params["limit_indices"][dim]
        return [pieces[0][start : stop : _stride(eqn, dim)]]
    if kind == "padded":
        low, _, step = _padding(eqn, dim)
        owners = np.full(shape_of(eqn.outvars[0])[dim], -1)
        places = low + step * np.arange(len(pieces[0]))
        inside = (places >= 0) & (places < len(owners))
        owners[places[inside]] = pieces[0][inside]
        return [owners]
    if kind == "joined":
        return [np.concatenate(pieces)]
    if kind is None:
        return [convolved_owners(eqn, dim, pieces[0], forward)]
    return np.split(pieces[0], np.cumsum(params["sizes"])[:-1])


def _padding(eqn: JaxprEqn, dim: int) -> tuple[int, int, int]:
    """Return the low and high padding along a dim, and the step between its elements."""
    low, high, interior = map(int, eqn.params["padding_config"][dim])
    return low, high, interior + 1


def one_token(eqn: JaxprEqn, value: Value) -> OneToken | None:
    """Return which slice has the only element of a dim of tokens that an equation leaves out."""
    places = [place for place in value.layout if place is not None]
    dropped = len(shape_of(eqn.outvars[0])) < len(value.layout)
    if not (dropped and operator_of(eqn).layout and len(places) == 1):
        return None
    (place,) = places
    alone = place.kind == ROW and place.cuts and place.cuts[-1] == place.outer == place.inner == 1
    return OneToken(place.cuts.index(1) - 1) if alone else None


# ---------------------------------------------------------------------------- writing


_Taker = Callable[[Atom, int, int], Atom]
"""Returns elements [start, stop) of an operand."""


def write_moved(writer: Writer, eqn: JaxprEqn, decision: Moved, number: int) -> None:
    """Write a slice's part of an equation that moves tokens along a dim."""
    for k, (var, place) in enumerate(zip(eqn.outvars, decision.places, strict=True)):
        if not is_drop(var):
            layout = layout_of_moved(var, decision.dim, place)
            result = writer.result(var, layout, number)
            start, _ = writer.slices.held(place, number)
            write_moved_from(writer, eqn, decision, k, result, number, start)
            writer.parts[var, number] = result


def layout_of_moved(var: Var, dim: int, place: Place) -> Layout:
    """Return the layout of a result with a place along the dim of tokens."""
    return tuple(place if d == dim else None for d in range(len(shape_of(var))))


def write_moved_from(
    writer: Writer,
    eqn: JaxprEqn,
    decision: Moved,
    position: int,
    result: Var,
    number: int,
    start: int,
) -> None:
    """Write a result of an equation that moves tokens, from the element `start` to a slice's
    last."""
    dim, kind = decision.dim, rearrangement(eqn)
    first = sum(shape_of(var)[dim] for var in eqn.outvars[:position])
    _, stop = writer.slices.held(decision.places[position], number)

    def taken(atom: Atom, start: int, stop: int) -> Atom:
        if decision.again and isinstance(atom, Var) and writer.is_recomputed(atom):
            layout = keys_of(writer.analysis.value(atom).layout)
            keys = writer.operand(atom, layout, number)
            span = (start, stop) if start < stop else (0, 0)
            return cut_along(writer, [keys], dim, span, 0, number)
        return writer.stretch_of(atom, dim, start, stop, number)

    others = {"padded": _write_pad, "joined": _write_concatenate, None: write_convolved}
    write = others.get(kind, _write_slice)
    write(writer, eqn, dim, (first + start, first + stop), result, number, taken)


def _write_slice(
    writer: Writer,
    eqn: JaxprEqn,
    dim: int,
    part: tuple[int, int],
    result: Var,
    number: int,
    taken: _Taker,
) -> None:
    """Write some elements of a slice, or of all results of a split together."""
    (source,) = eqn.invars
    starts, stops = [0] * len(shape_of(source)), list(shape_of(source))
    steps = [1] * len(starts)
    if rearrangement(eqn) == "part":
        starts, stops = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
        steps = [_stride(eqn, d) for d in range(len(starts))]
    start = min(starts[dim] + part[0] * steps[dim], stops[dim])
    stop = starts[dim] + (part[1] - 1) * steps[dim] + 1
    held = taken(source, start, max(start, stop))
    starts[dim], stops[dim] = 0, shape_of(held)[dim]

    def run(value: Array) -> Array:
        return lax.slice(value, starts, stops, steps)

    key = "part", tuple(starts), tuple(stops), tuple(steps)
    writer.compute(key, run, [held], [result], number, eqn)


def _write_pad(
    writer: Writer,
    eqn: JaxprEqn,
    dim: int,
    part: tuple[int, int],
    result: Var,
    number: int,
    taken: _Taker,
) -> None:
    source, value = eqn.invars
    (start, stop), size = part, shape_of(source)[dim]
    low, _, step = _padding(eqn, dim)
    first, last = (min(max(-(-(end - low) // step), 0), size) for end in part)
    before, after = stop - start, 0
    if first < last:
        before = low + first * step - start
        after = stop - (low + (last - 1) * step + 1)
    config: list[tuple[int, int, int]] = [
        (int(one), int(two), int(three)) for one, two, three in eqn.params["padding_config"]
    ]
    config[dim] = (before, after, step - 1)

    def run(padded: Array, by: Array) -> Array:
        return lax.pad(padded, by, config)

    held = [taken(source, first, last), writer.operand(value, (), number)]
    writer.compute(("padded", tuple(config)), run, held, [result], number, eqn)


def _write_concatenate(
    writer: Writer,
    eqn: JaxprEqn,
    dim: int,
    part: tuple[int, int],
    result: Var,
    number: int,
    taken: _Taker,
) -> None:
    held, offset = [], 0
    for atom in eqn.invars:
        size = shape_of(atom)[dim]
        start, stop = max(part[0] - offset, 0), min(part[1] - offset, size)
        if start < stop:
            held.append(taken(atom, start, stop))
        offset += size
    held = held or [taken(eqn.invars[0], 0, 0)]

    def run(*values: Array) -> Array:
        return lax.concatenate(values, dim)

    writer.compute(("joined", dim), run, held, [result], number, eqn)


def stretch_of(writer: Writer, atom: Atom, dim: int, start: int, stop: int, number: int) -> Atom:
    """Return elements [start, stop) along a dim of a value, of whichever slices made them."""
    value = writer.analysis.value(atom)
    place = value.layout[dim]
    if isinstance(atom, Literal) or not value.in_parts or place is None:
        parts = [writer.operand(atom, whole(len(value.layout)), number)]
        first, last = 0, shape_of(atom)[dim]
    else:
        cuts = writer.slices.cuts_of(place)
        spans = enumerate(itertools.pairwise(cuts))
        some = [k for k, (one, two) in spans if max(one, start) < min(two, stop)] or [number]
        parts = [_with_keys(writer, writer.part(atom, k), value.layout, number) for k in some]
        first, last = cuts[some[0]], cuts[some[-1] + 1]
    if start == stop:
        return cut_along(writer, parts, dim, (first, first), first, number)
    if len(parts) == 1 and (start, stop) == (first, last):
        return parts[0]
    return cut_along(writer, parts, dim, (start, stop), first, number)


def _with_keys(writer: Writer, part: Atom, layout: Layout, number: int) -> Atom:
    """Return rows of an earlier slice with the keys of a slice, and nothing behind their own."""
    held = list(shape_of(part))
    for d, place in enumerate(layout):
        if place is not None and place.kind == KEY:
            held[d] = writer.slices.held(place, number)[1] * place.inner
    if tuple(held) == shape_of(part):
        return part
    config = [(0, want - have, 0) for want, have in zip(held, shape_of(part), strict=True)]
    result = Var(array_type(part).update(shape=tuple(held)))

    def run(value: Array) -> Array:
        return lax.pad(value, value.dtype.type(0), config)

    writer.compute(("keys behind", *config), run, [part], [result], number)
    return result


def cut_along(
    writer: Writer,
    parts: Sequence[Atom],
    dim: int,
    span: tuple[int, int],
    first: int,
    number: int,
) -> Atom:
    """Return elements [start, stop) of parts that begin with the element `first`."""
    start, stop = span[0] - first, span[1] - first
    shape = list(shape_of(parts[0]))
    shape[dim] = stop - start
    result = Var(array_type(parts[0]).update(shape=tuple(shape)))

    def run(*values: Array) -> Array:
        joined = values[0] if len(values) == 1 else lax.concatenate(values, dim)
        return lax.slice_in_dim(joined, start, stop, axis=dim)

    writer.compute(("stretch of", dim, start, stop), run, parts, [result], number)
    return result
