"""Slices, paddings and concatenations along the dim of keys, as for the scores of attention sinks.

Each slice has the keys up to its end. What is joined in front of them or behind, all slices have:

    concatenate([sinks, scores, sinks], keys)   front, keys, after
    slice                                       the same without some of front or after, or those
    pad                                         the padding is in front, and after
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax import Array, lax

from alpa_meta.compat import JaxprEqn, is_drop, shape_of
from alpa_meta.operators.cutting import rearrangement
from alpa_meta.token_slices.places import KEY, Layout, Place, Slices
from alpa_meta.token_slices.reading import UnreadableError
from alpa_meta.token_slices.values import MovedKeys, Value

if TYPE_CHECKING:
    from alpa_meta.token_slices.writer import Writer

_REASON = "cuts, joins or reorders the dim of tokens"


def keys_moved(
    eqn: JaxprEqn, dim: int, operands: Sequence[Value], slices: Slices, sweep: int
) -> tuple[MovedKeys, list[Value]] | None:
    """Return how an equation moves keys along their dim, and its results; None if it moves none."""
    holders = [k for k, value in enumerate(operands) if _has_keys(value, dim)]
    if not holders or rearrangement(eqn) is None:
        return None
    (number, *others) = holders
    source = operands[number]
    place = source.layout[dim]
    if others or place is None or place.outer * place.inner > 1:
        raise UnreadableError(_REASON)
    if _cuts_others(eqn, dim):
        raise UnreadableError(_REASON)
    made: list[Place | None]
    if rearrangement(eqn) in ("joined", "padded"):
        made = [_grown(eqn, dim, number, place, slices)]
    else:
        made = [_part(span, place, slices) for span in _spans(eqn, dim)]
    apart = _with(source.layout, dim, None)
    read = [source.layout if k == number else apart for k in range(len(operands))]
    if rearrangement(eqn) == "padded":
        read[1] = ()
    layouts = tuple(_with(source.layout, dim, one) for one in made)
    rests = (None if one is None else source.rest for one in made)
    results = [
        Value("sliced", layout, sweep, rest=rest, dead=source.dead)
        for layout, rest in zip(layouts, rests, strict=True)
    ]
    return MovedKeys(dim, number, tuple(read), layouts), results


def _has_keys(value: Value, dim: int) -> bool:
    place = value.layout[dim] if value.in_parts and value.layout else None
    return place is not None and place.kind == KEY


def _with(layout: Layout, dim: int, place: Place | None) -> Layout:
    return tuple(place if d == dim else one for d, one in enumerate(layout))


def _grown(eqn: JaxprEqn, dim: int, number: int, place: Place, slices: Slices) -> Place:
    """Return the place of keys that others are joined with, or padding."""
    if rearrangement(eqn) == "joined":
        sizes = [shape_of(atom)[dim] for atom in eqn.invars]
        return _placed(place, sum(sizes[:number]), sum(sizes[number + 1 :]) + place.after, slices)
    low, high, step = map(int, eqn.params["padding_config"][dim])
    if step or low < 0 or high < 0:
        raise UnreadableError(_REASON)
    return _placed(place, low, place.after + high, slices)


def _part(span: tuple[int, int], place: Place, slices: Slices) -> Place | None:
    """Return the place of some of the keys; None where every slice has all of them."""
    (start, stop), cuts = span, slices.cuts_of(place)
    if stop <= cuts[1] or start >= cuts[-1]:
        return None
    if start > cuts[1] or stop < cuts[-1]:
        raise UnreadableError(_REASON)
    return _placed(place, -start, stop - cuts[-1], slices)


def _placed(place: Place, front: int, after: int, slices: Slices) -> Place:
    cuts = (0, *(cut + front for cut in slices.cuts_of(place)[1:]))
    return Place(KEY, cuts=() if cuts == slices.cuts else cuts, after=after)


def _spans(eqn: JaxprEqn, dim: int) -> list[tuple[int, int]]:
    """Return the elements [start, stop) that are the results of a slice or a split."""
    if rearrangement(eqn) == "part":
        if eqn.params["strides"] is not None:
            raise UnreadableError(_REASON)
        return [(eqn.params["start_indices"][dim], eqn.params["limit_indices"][dim])]
    ends = [0, *itertools.accumulate(shape_of(var)[dim] for var in eqn.outvars)]
    return list(itertools.pairwise(ends))


def _cuts_others(eqn: JaxprEqn, dim: int) -> bool:
    """Return whether an equation changes dims beside one."""
    shapes = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return any(one != two for d, (one, two) in enumerate(zip(*shapes)) if d != dim)


def write_keys_moved(writer: Writer, eqn: JaxprEqn, decision: MovedKeys, number: int) -> None:
    """Write a slice's part of an equation that moves keys."""
    dim, kind, params = decision.dim, rearrangement(eqn), eqn.params
    operands = [
        writer.operand(atom, layout, number)
        for atom, layout in zip(eqn.invars, decision.operands, strict=True)
    ]
    results = [
        writer.result(var, layout, number)
        for var, layout in zip(eqn.outvars, decision.results, strict=True)
    ]
    place = decision.operands[decision.source][dim]
    assert place is not None
    last = writer.slices.cuts_of(place)[-1]
    missing = last - writer.slices.held(place, number)[1]  # keys of later slices
    sizes = [shape_of(result)[dim] for result in results]

    def run(*values: Array) -> Array | list[Array]:
        if kind == "joined":
            return lax.concatenate(values, dim)
        if kind == "padded":
            padded, by = values
            return lax.pad(padded, by, params["padding_config"])
        starts = (start - missing * (start >= last) for start, _ in _spans(eqn, dim))
        pairs = zip(starts, sizes, strict=True)
        return [lax.slice_in_dim(values[0], start, start + size, axis=dim) for start, size in pairs]

    key = "keys", kind, str(params), number, decision.results, tuple(map(shape_of, eqn.outvars))
    writer.compute(key, run, operands, results, number, eqn)
    for var, result in zip(eqn.outvars, results, strict=True):
        if not is_drop(var):
            writer.parts[var, number] = result
