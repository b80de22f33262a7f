"""Gathers of every place along a dim, in order: the operand, its dims in another order.

A loop that picks a part of the batch by its number, `x[k]`, is a gather at `jnp.arange` of it once
all its rounds run at once:

    gather(x [4, 8], iota(4), slices [1, 8])   is   x [4, 1, 8]
"""

from __future__ import annotations

from jax import Array, lax

from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.operators.rewrites.lookups import place_dim
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite


def _operand(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    operand, indices = eqn.invars
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, places = shape_of(operand), shape_of(indices)
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (dim,), left_out = numbers.start_index_map, set(numbers.collapsed_slice_dims)
    if sizes != (*shape[:dim], 1, *shape[dim + 1 :]) or not left_out <= {dim}:
        return None
    if places != (shape[dim], 1) or place_dim(_column(indices, origins), origins) != 0:
        return None
    (result,) = eqn.outvars
    (front,) = set(range(len(shape_of(result)))) - set(numbers.offset_dims)
    before = [d for d in range(len(shape)) if d not in left_out][:front]
    order = [d for d in range(len(shape)) if d != dim]
    order.insert(len([d for d in before if d != dim]), dim)

    def moved(x: Array) -> Array:
        return lax.reshape(lax.transpose(x, order), shape_of(result))

    return replacement(moved, [operand], [result], eqn)


def _column(indices: Atom, origins: Origins) -> Atom:
    """Return the column that one of several joined ones was cut out as, or the indices."""
    cut = origins.eqn(indices)
    join = None if cut is None or cut.primitive.name != "slice" else origins.eqn(cut.invars[0])
    if cut is None or join is None or join.primitive.name != "concatenate":
        return indices
    columns, last = len(join.invars), len(shape_of(indices)) - 1
    starts = cut.params["start_indices"]
    apart = join.params["dimension"] == last and shape_of(join.outvars[0])[last] == columns
    if apart and shape_of(indices) == shape_of(join.invars[0]):
        column: Atom = join.invars[starts[last]]
        return column
    return indices


ALL_PLACES = Rewrite(frozenset({"gather"}), _operand)
