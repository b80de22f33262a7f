"""Reads and writes at one place that is known: slices and joins of slices.

`x.at[:, 0].set(y)` is traced to a scatter at a place that happens to be constant, as if any could
be written. Where it is known and inside, what is not written stays where it is:

    gather(x, 3)                is  x[3:4], without the dims left out
    dynamic_slice(x, 0, 12)     is  x[0:12]
    scatter(x, 3, y)            is  concatenate([x[:3], y, x[4:]])
    scatter-add(x, 3, y)        is  x + pad(y)

A scatter of a part of several dims at once is left as it is.
"""

from __future__ import annotations

from typing import cast

import jax
import numpy as np
from jax import Array, lax

from alpa_meta import compat
from alpa_meta.compat import Atom, JaxprEqn, Literal, shape_of
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite
from alpa_meta.types import HostArray

_MADE_OF = ("broadcast_in_dim", "concatenate", "convert_element_type", "reshape", "squeeze")
_MOST_INDICES = 8  # a place has one for each dim; more are those of several places


def _at_known_place(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    """Return the slices and joins that a gather or scatter at one known place is equal to."""
    operand, indices = eqn.invars[:2]
    numbers, shape = eqn.params["dimension_numbers"], shape_of(operand)
    gathers = eqn.primitive.name == "gather"
    dims = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    if shape_of(indices) != (len(dims),) or (place := _known(indices, origins)) is None:
        return None
    left_out = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    if gathers:
        sizes = list(eqn.params["slice_sizes"])
    else:
        window = iter(shape_of(eqn.invars[2]))
        sizes = [1 if d in left_out else next(window) for d in range(len(shape))]
    starts = [0] * len(shape)
    for dim, start in zip(dims, place.tolist(), strict=True):
        starts[dim] = int(start)
    stops = [start + size for start, size in zip(starts, sizes, strict=True)]
    if any(start < 0 or stop > whole for start, stop, whole in zip(starts, stops, shape)):
        return None
    if gathers:
        return replacement(
            lambda x: lax.squeeze(lax.slice(x, starts, stops), left_out),
            [operand],
            eqn.outvars,
            eqn,
        )
    partial = [d for d, size in enumerate(sizes) if size < shape[d]]
    if eqn.primitive.name == "scatter" and len(partial) > 1:
        return None

    def written(x: Array, y: Array) -> Array:
        part = lax.expand_dims(y, left_out)
        if eqn.primitive.name == "scatter":
            (dim,) = partial or (0,)
            before = lax.slice_in_dim(x, 0, starts[dim], axis=dim)
            after = lax.slice_in_dim(x, stops[dim], shape[dim], axis=dim)
            pieces = [one for one in (before, part, after) if one.shape[dim]]
            return lax.concatenate(pieces, dim) if len(pieces) > 1 else part
        padding = [(start, whole - stop, 0) for start, stop, whole in zip(starts, stops, shape)]
        return lax.add(x, lax.pad(part, np.zeros((), part.dtype), padding))

    return replacement(written, [operand, eqn.invars[2]], eqn.outvars, eqn)


def _known(atom: Atom, origins: Origins) -> HostArray | None:
    """Return the indices that a value is, if they are known."""
    if isinstance(atom, Literal):
        return np.asarray(atom.val)
    if len(shape_of(atom)) > 1 or sum(shape_of(atom)) > _MOST_INDICES:
        return None
    constant, eqn = origins.constant(atom), origins.eqn(atom)
    if constant is not None:
        return np.asarray(constant)
    if eqn is None or eqn.primitive.name not in _MADE_OF:
        return None
    operands = [_known(operand, origins) for operand in eqn.invars]
    if any(operand is None for operand in operands):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(compat.bind(eqn, cast(list[Array], operands))[0])


def _from_known_starts(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    """Return the slice that a dynamic one from known starts is equal to."""
    operand, *atoms = eqn.invars
    sizes, starts = eqn.params["slice_sizes"], []
    for atom, size, whole in zip(atoms, sizes, shape_of(operand), strict=True):
        known = _known(atom, origins)
        if known is None:
            return None
        starts.append(min(max(int(known), 0), whole - size))
    stops = [start + size for start, size in zip(starts, sizes, strict=True)]
    return replacement(lambda x: lax.slice(x, starts, stops), [operand], eqn.outvars, eqn)


def _replaced(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    dynamic = eqn.primitive.name == "dynamic_slice"
    return (_from_known_starts if dynamic else _at_known_place)(eqn, origins)


KNOWN_PLACES = Rewrite(frozenset({"gather", "scatter", "scatter-add", "dynamic_slice"}), _replaced)
