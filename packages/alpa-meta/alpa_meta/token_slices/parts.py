"""What a slice holds of a value, and an operator's local form on it.

Local forms are written for the equal parts of devices; here the parts may be of any length, and
nothing is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from alpa_interchange import LogicalMesh, MeshAxis, ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import JaxprEqn, shape_of
from alpa_meta.operators import LocalCall, operator_of, sharding_rule
from alpa_meta.token_slices.places import KEY, ROW, Layout, Place, Slices, factor_place
from alpa_meta.token_slices.reading import Reading

if TYPE_CHECKING:
    from alpa_meta.spmd.collectives import Collectives

_AXES = {ROW: ROW, KEY: KEY, "earlier rows": KEY}
"""What is cut along each axis that stands for the slices; rows may be recomputed from the first."""


class UnsupportedError(Exception):
    """A local form that cannot make the part of one slice."""


class _SlicePlaces:
    """The slices as devices of an axis: nothing is sent between them."""

    def __init__(self, number: int) -> None:
        self.number = number

    def index(self, _: tuple[str, ...]) -> np.int32:
        """Return the slice's place in the order of its sweep."""
        return np.int32(self.number)

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(name)


class SliceCall(LocalCall):
    """One operator on one slice, whose parts may be of any length."""

    def __init__(self, slices: Slices, number: int, reading: Reading, call: LocalCall) -> None:
        super().__init__(
            call.eqn, call.operands, call.rule, call.strategy, call.mesh, call.collectives
        )
        object.__setattr__(self, "_of", (slices, number, reading))

    def _shape(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        slices, number, _ = self._of  # type: ignore[attr-defined]
        held: tuple[int, ...] = slices.shape(shape, layout, number)
        return held

    def result_shape(self, result: int) -> tuple[int, ...]:
        layout = self._of[2].results[result]  # type: ignore[attr-defined]
        return self._shape(shape_of(self.eqn.outvars[result]), layout)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        layout = self._of[2].operands[operand]  # type: ignore[attr-defined]
        return self._shape(shape_of(self.eqn.invars[operand]), layout)

    def first(self, axes: tuple[str, ...], size: int) -> np.int32:
        place, start, _ = self._place(axes)
        if place.outer > 1 or place.after:
            raise UnsupportedError("first")  # its elements are in several stretches
        return np.int32(start * place.inner)

    def _place(self, axes: tuple[str, ...]) -> tuple[Place, int, int]:
        """Return the place of the tokens along `axes`, and the elements [start, stop) there."""
        slices, number, reading = self._of  # type: ignore[attr-defined]
        places = itertools.chain(*reading.operands, *reading.results)
        place = next(one for one in places if one is not None and one.kind == _AXES[axes[0]])
        return place, *slices.held(place, number)

    def held(self, axes: tuple[str, ...], places: Array, size: int) -> tuple[Array, Array]:
        place, start, stop = self._place(axes)
        if place.after:
            raise UnsupportedError("held")
        block = self._of[0].cuts_of(place)[-1] * place.inner  # type: ignore[attr-defined]
        within = places % block - start * place.inner
        each = (stop - start) * place.inner
        inside = (places >= 0) & (places < block * place.outer) & (within >= 0) & (within < each)
        return jnp.where(inside, places // block * each + within, 0), inside

    def shards(self, axes: tuple[str, ...]) -> int:
        if axes:
            raise UnsupportedError("shards")
        return 1

    def own_part(self, value: Array, result: int, dims: Sequence[int] | None = None) -> Array:
        slices, number, reading = self._of  # type: ignore[attr-defined]
        layout = reading.results[result]
        kept = range(value.ndim) if dims is None else dims
        return cut_out(
            value, tuple(p if d in kept else None for d, p in enumerate(layout)), slices, number
        )


def cut_out(value: Array, layout: Layout, slices: Slices, number: int) -> Array:
    """Return what a slice holds of a whole value."""
    for dim, place in enumerate(layout):
        if place is not None:
            start, stop = slices.held(place, number)
            after = lax.slice_in_dim(value, value.shape[dim] - place.after, None, axis=dim)
            value = stretch(value, dim, place, slices.cuts_of(place)[-1], start, stop)
            value = lax.concatenate([value, after], dim) if place.after else value
    return value


def stretch(value: Array, dim: int, place: Place, tokens: int, start: int, stop: int) -> Array:
    """Return tokens [start, stop) of the `tokens` in a dim."""
    if place.outer == 1:
        inner = place.inner
        return lax.slice_in_dim(value, start * inner, stop * inner, axis=dim)
    before, after = value.shape[:dim], value.shape[dim + 1 :]
    blocks = lax.reshape(value, (*before, place.outer, tokens, place.inner, *after))
    taken = lax.slice_in_dim(blocks, start, stop, axis=dim + 1)
    size = place.outer * (stop - start) * place.inner
    return lax.reshape(taken, (*before, size, *after))


def joined_rows(dim: int, place: Place, *parts: Array) -> Array:
    """Return the rows of several slices as one value."""
    if place.outer == 1:
        return lax.concatenate(parts, dim)
    blocks = []
    for part in parts:
        before, after = part.shape[:dim], part.shape[dim + 1 :]
        tokens = part.shape[dim] // (place.outer * place.inner)
        blocks.append(lax.reshape(part, (*before, place.outer, tokens, place.inner, *after)))
    whole_blocks = lax.concatenate(blocks, dim + 1)
    size = place.outer * whole_blocks.shape[dim + 1] * place.inner
    return lax.reshape(whole_blocks, (*before, size, *after))


def joined_parts(shape: Sequence[int], layout: Layout, parts: Sequence[Array]) -> Array:
    """Return a value of this shape, whose rows the slices have, and 0 behind their keys."""
    (row,) = (d for d, place in enumerate(layout) if place is not None and place.kind == ROW)
    place = layout[row]
    assert place is not None
    padded = []
    for part in parts:
        ends = [
            size if p and p.kind == KEY else held
            for size, p, held in zip(shape, layout, part.shape)
        ]
        config = [(0, end - held, 0) for end, held in zip(ends, part.shape, strict=True)]
        padded.append(
            lax.pad(part, part.dtype.type(0), config) if tuple(ends) != part.shape else part
        )
    return joined_rows(row, place, *padded)


def run_local(
    eqn: JaxprEqn,
    reading: Reading,
    slices: Slices,
    number: int,
    place: int,
    values: Sequence[Array],
) -> list[Array]:
    """Return what slice `number`, at a `place` in the order of its sweep, makes of an operator."""
    rule = sharding_rule(eqn)
    assert rule is not None
    strategy = _strategy(rule, reading, slices)
    mesh = LogicalMesh(axes=tuple(MeshAxis(name=axis, size=2) for axis in _AXES))
    places = cast("Collectives", _SlicePlaces(place))
    call = LocalCall(eqn, list(values), rule, strategy, mesh, places)
    return operator_of(eqn).local(SliceCall(slices, number, reading, call))


def _strategy(rule: ShardingRule, reading: Reading, slices: Slices) -> Strategy:
    """Return the slices as a strategy over axes of their own, for the operator's local form."""
    axes: dict[str, str] = {}

    def spec(dims: Sequence[Sequence[str]], layout: Layout) -> ShardingSpec:
        held: list[tuple[str, ...]] = [()] * len(layout)
        for d, (dim, place) in enumerate(zip(dims, layout, strict=True)):
            if place is not None:
                name, _ = factor_place(rule, dim, place, slices)
                free = (a for a, kind in _AXES.items() if kind == place.kind)
                known = axes.values()
                axes[name] = axes.get(name) or next(axis for axis in free if axis not in known)
                held[d] = (axes[name],)
        return ShardingSpec(tuple(held))

    operands = tuple(map(spec, rule.operands, reading.operands))
    results = tuple(map(spec, rule.results, reading.results))
    assignment = tuple(sorted((name, (axis,)) for name, axis in axes.items()))
    return Strategy(assignment=assignment, operands=operands, results=results)
