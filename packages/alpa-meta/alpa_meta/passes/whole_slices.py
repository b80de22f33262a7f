"""Dims that a gather reads whole, or a scatter writes whole, are not indexed.

`jax.vmap` of `lax.dynamic_slice` makes a gather that indexes every dim of the operand, the batch of
windows cut out of a signal too. A start that is clipped into range is 0 where the slice is as large
as the dim, whatever the index says:

    gather(x [8, 160], i [9, 2], slices [8, 32])   is   gather(x, i[:, 1:], slices [8, 32])

so that the dim may be sharded, and the examples of a batch stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax

from alpa_meta.compat import ClosedJaxpr, JaxprEqn, Var, array_type, shape_of, with_eqns
from alpa_meta.passes.replacement import replacement


def without_whole_dims(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with clipped gathers and scatters that index only what they cut."""
    return with_eqns(program, _indexed(program.jaxpr.eqns))


def _indexed(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "gather":
            yield from _less_indexed(eqn, "start_index_map", eqn.params["slice_sizes"])
        elif name.startswith("scatter"):
            yield from _less_indexed(eqn, "scatter_dims_to_operand_dims", _written_sizes(eqn))
        else:
            yield eqn


def _less_indexed(eqn: JaxprEqn, indexed: str, sizes: Sequence[int]) -> Iterator[Any]:
    """Yield a gather or scatter of slices of `sizes` without the indices of whole dims."""
    operand, indices = eqn.invars[:2]
    numbers = eqn.params["dimension_numbers"]
    dims = getattr(numbers, indexed)
    cut = [k for k, dim in enumerate(dims) if sizes[dim] < shape_of(operand)[dim]]
    kept = cut or list(range(len(dims)))[-1:]  # some index has to be left
    if eqn.params["mode"] != lax.GatherScatterMode.CLIP or len(kept) == len(dims):
        yield eqn
        return
    less = Var(array_type(indices).update(shape=(*shape_of(indices)[:-1], len(kept))))

    def columns(values: Any) -> Any:
        parts = [lax.slice_in_dim(values, k, k + 1, axis=-1) for k in kept]
        return lax.concatenate(parts, values.ndim - 1) if len(parts) > 1 else parts[0]

    yield from replacement(columns, [indices], [less], eqn)
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(**{indexed: tuple(dims[k] for k in kept)}),
        "indices_are_sorted": False,
    }
    yield eqn.replace(invars=[operand, less, *eqn.invars[2:]], params=params)


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
