"""Shifts along a dim, which programs write as a cut and a join: one operator on the whole dim.

`pad(x[:, :-1], ...)` moves every element to the next place of a dim, `concatenate([x[:, -1:],
x[:, :-1]], 1)` (`jnp.roll`) goes round it. No number of devices divides a dim less one element, so
that the dim would be gathered in between; of the merged operator only the edges are exchanged:

    pad(x[a : n - b], low, high)     is  pad(x, low - a, high - b)
    concatenate([first, second])     is  select(place < len(first), pad(first), pad(second))
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax import Array, lax

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite

_MOST_PARTS = 3


@frozen(eq=False)
class _Cut:
    """A value that is `source` without (before, after) elements at the ends of each dim."""

    source: Var
    ends: tuple[tuple[int, int], ...]


def _merged(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    """Return a pad or join merged with the cuts of what it restores the size of."""
    cuts: dict[Atom, _Cut] = {
        atom: cut
        for atom in eqn.invars
        if not isinstance(atom, Literal) and (cut := _cut(atom, origins)) is not None
    }
    if eqn.primitive.name == "pad":
        padded = eqn.invars[0]
        return _merged_pad(eqn, cuts[padded]) if padded in cuts else None
    return _merged_join(eqn, cuts) if _is_shift(eqn, cuts) else None


def _cut(var: Var, origins: Origins) -> _Cut | None:
    """Return what a value is cut out of, None if it is no cut."""
    found: _Cut | None = None
    while (eqn := origins.eqn(var)) is not None:
        ends = None if 0 in shape_of(var) else _cut_ends(eqn, var)
        source = eqn.invars[0] if ends is not None else None
        if ends is None or not isinstance(source, Var):
            break
        if found is not None:
            ends = [(a + c, b + d) for (a, b), (c, d) in zip(ends, found.ends, strict=True)]
        found = _Cut(source, tuple(ends))
        var = source
    return found


def _cut_ends(eqn: JaxprEqn, result: Var) -> list[tuple[int, int]] | None:
    """Return how many elements of each dim of its operand an equation leaves out before and after
    `result`, None if it does more than that."""
    name, params = eqn.primitive.name, eqn.params
    if name == "split":
        axis, sizes = params["axis"], [int(size) for size in params["sizes"]]
        number = eqn.outvars.index(result)
        before, after = sum(sizes[:number]), sum(sizes[number + 1 :])
        return [(before, after) if d == axis else (0, 0) for d in range(len(shape_of(result)))]
    if name == "pad":
        config = params["padding_config"]
        if all(max(amount) <= 0 and amount[2] == 0 for amount in config):
            return [(-int(low), -int(high)) for low, high, _ in config]
    if name == "slice" and all(stride == 1 for stride in params["strides"] or ()):
        shape = shape_of(eqn.invars[0])
        limits = zip(shape, params["start_indices"], params["limit_indices"], strict=True)
        return [(int(start), int(size - stop)) for size, start, stop in limits]
    return None


def _merged_pad(eqn: JaxprEqn, cut: _Cut) -> list[JaxprEqn] | None:
    """Return the pad of a cut as a pad of what was cut, if that restores the size."""
    if shape_of(eqn.outvars[0]) != shape_of(cut.source):
        return None
    config = []
    for (low, high, between), (before, after) in zip(
        eqn.params["padding_config"], cut.ends, strict=True
    ):
        if (before and low > 0) or (after and high > 0) or between:
            return None
        config.append((int(low) - before, int(high) - after, 0))
    params = {**eqn.params, "padding_config": tuple(config)}
    return [eqn.replace(invars=[cut.source, eqn.invars[1]], params=params)]


def _is_shift(eqn: JaxprEqn, cuts: Mapping[Atom, _Cut]) -> bool:
    """Return whether a join of few parts, one of them cut, has the shape of what was cut."""
    shape, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    dtype = dtype_of(eqn.outvars[0])
    parts = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    if not 2 <= len(parts) == len(eqn.invars) <= _MOST_PARTS or jnp.issubdtype(
        dtype, jax.dtypes.extended
    ):
        return False
    return any(
        part in cuts
        and shape_of(cuts[part].source) == shape
        and all(d == dim or ends == (0, 0) for d, ends in enumerate(cuts[part].ends))
        for part in parts
    )


def _merged_join(eqn: JaxprEqn, cuts: Mapping[Atom, _Cut]) -> list[JaxprEqn]:
    """Return the equations of a join of parts, each padded to the size of the result."""
    shape, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    dtype = dtype_of(eqn.outvars[0])
    sources, configs, stops, place = [], [], [], 0
    for part in eqn.invars:
        size = shape_of(part)[dim]
        ends: tuple[int, int] = (0, 0)
        source = part
        if part in cuts and all(
            d == dim or other == (0, 0) for d, other in enumerate(cuts[part].ends)
        ):
            source, ends = cuts[part].source, cuts[part].ends[dim]
        low, high = place - ends[0], shape[dim] - place - size - ends[1]
        configs.append([(low, high, 0) if d == dim else (0, 0, 0) for d in range(len(shape))])
        sources.append(source)
        place += size
        stops.append(place)

    def joined(*values: Array) -> Array:
        padded = [
            lax.pad(value, np.zeros((), dtype), config)
            for value, config in zip(values, configs, strict=True)
        ]
        places = lax.broadcasted_iota(np.int32, shape, dim)
        result = padded[-1]
        for stop, part in zip(stops[-2::-1], padded[-2::-1], strict=True):
            result = lax.select(places < stop, part, result)
        return result

    return replacement(joined, sources, eqn.outvars, eqn)


MERGED_SHIFTS = Rewrite(frozenset({"pad", "concatenate"}), _merged)
