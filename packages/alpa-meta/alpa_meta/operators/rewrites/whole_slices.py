"""Dims that a gather reads whole, or a scatter writes whole, are not indexed.

`jax.vmap` of `lax.dynamic_slice` makes a gather that indexes every dim of the operand, the batch of
windows cut out of a signal too. A start that is clipped into range is 0 where the slice is as large
as the dim, whatever the index says:

    gather(x [8, 160], i [9, 2], slices [8, 32])   is   gather(x, i[:, 1:], slices [8, 32])

so that the dim may be sharded, and the examples of a batch stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array, lax

from alpa_meta.compat import JaxprEqn, Var, array_type, shape_of
from alpa_meta.operators.indexing import SCATTERS
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite


def _indexed(eqn: JaxprEqn, _: Origins) -> list[JaxprEqn] | None:
    if eqn.primitive.name == "gather":
        return _less_indexed(eqn, "start_index_map", eqn.params["slice_sizes"])
    return _less_indexed(eqn, "scatter_dims_to_operand_dims", _written_sizes(eqn))


def _less_indexed(eqn: JaxprEqn, indexed: str, sizes: Sequence[int]) -> list[JaxprEqn] | None:
    """Return a gather or scatter of slices of `sizes` without the indices of whole dims."""
    operand, indices = eqn.invars[:2]
    numbers = eqn.params["dimension_numbers"]
    dims = getattr(numbers, indexed)
    cut = [k for k, dim in enumerate(dims) if sizes[dim] < shape_of(operand)[dim]]
    kept = cut or list(range(len(dims)))[-1:]  # some index has to be left
    if eqn.params["mode"] != lax.GatherScatterMode.CLIP or len(kept) == len(dims):
        return None
    less = Var(array_type(indices).update(shape=(*shape_of(indices)[:-1], len(kept))))

    def columns(values: Array) -> Array:
        parts = [lax.slice_in_dim(values, k, k + 1, axis=-1) for k in kept]
        return lax.concatenate(parts, values.ndim - 1) if len(parts) > 1 else parts[0]

    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(**{indexed: tuple(dims[k] for k in kept)}),
        "indices_are_sorted": False,
    }
    merged = eqn.replace(invars=[operand, less, *eqn.invars[2:]], params=params)
    return [*replacement(columns, [indices], [less], eqn), merged]


def _written_sizes(eqn: JaxprEqn) -> list[int]:
    """Return the size of what a scatter writes, along each dim of its operand."""
    operand, _, updates = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(numbers.update_window_dims)
    return [
        1 if dim in single else shape_of(updates)[next(window)]
        for dim in range(len(shape_of(operand)))
    ]


WHOLE_SLICES = Rewrite(frozenset({"gather", *SCATTERS}), _indexed)
