"""Lookups at a row's own place, which programs write with `jnp.arange`: one batching dim instead.

`logp[jnp.arange(B), labels]` reads row b at `labels[b]`, but is traced to a gather at the computed
places (b, labels[b]), as if a row could be read for any other. A dim of the operand that is indexed
by the place along a batch dim of the indices is batched with it, as in `jnp.take_along_axis`:

    gather(x, concatenate([iota, i]))   is   gather(x, i), the rows of x and of i one batching dim

and the same for every scatter, a gather's gradient among them.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of
from alpa_meta.operators.indexing import SCATTERS
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite

_GATHER = ("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims")
_SCATTER = (
    "scatter_dims_to_operand_dims",
    "inserted_window_dims",
    "scatter_indices_batching_dims",
)
_SAME_DIMS = ("convert_element_type", "copy", "copy_p", "select_n")
_UNIT_DIMS = ("reshape", "squeeze", "expand_dims")


def _batched(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    """Return a gather or scatter without the index columns that are places, and its indices."""
    operand, indices = eqn.invars[:2]
    numbers, join = eqn.params["dimension_numbers"], origins.eqn(indices)
    indexed, left_out, batching = _GATHER if eqn.primitive.name == "gather" else _SCATTER
    dims, vector_dim = getattr(numbers, indexed), len(shape_of(indices)) - 1
    if join is None or join.primitive.name != "concatenate":
        return None
    if join.params["dimension"] != vector_dim or len(join.invars) != len(dims):
        return None
    pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, batching), strict=True))
    kept = []
    for dim, column in zip(dims, join.invars, strict=True):
        place = place_dim(column, origins)
        if (
            dim in getattr(numbers, left_out)
            and place is not None
            and place not in (vector_dim, *pairs.values())
            and shape_of(indices)[place] == shape_of(operand)[dim]
        ):
            pairs[dim] = place
        else:
            kept.append((dim, column))
    if not kept:  # some index has to be left
        del pairs[dims[-1]]
        kept = [(dims[-1], join.invars[-1])]
    if len(kept) == len(dims):
        return None
    operand_dims, index_dims = zip(*sorted(pairs.items()), strict=True)
    replaced = {
        indexed: tuple(dim for dim, _ in kept),
        left_out: tuple(dim for dim in getattr(numbers, left_out) if dim not in pairs),
        "operand_batching_dims": operand_dims,
        batching: index_dims,
    }
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(**replaced),
        "indices_are_sorted": False,
    }
    columns = [column for _, column in kept]
    added = []
    if len(columns) > 1:
        joined = Var(indices.aval.update(shape=(*shape_of(indices)[:-1], len(columns))))
        added = [join.replace(invars=columns, outvars=[joined])]
        columns = [joined]
    return [*added, eqn.replace(invars=[operand, *columns, *eqn.invars[2:]], params=params)]


def place_dim(atom: Atom, origins: Origins) -> int | None:
    """Return the dim along which each element of a value is its own place, if one is found."""
    path: list[JaxprEqn] = []
    while (eqn := origins.eqn(atom)) is not None:
        source = _carried(eqn, origins)
        if source is None:
            break
        path.append(eqn)
        atom = source
    dim = _counted_dim(atom, origins)
    for eqn in reversed(path):
        dim = None if dim is None else _carried_dim(eqn, dim)
        if dim is not None and not _holds_places(eqn.outvars[0], dim):
            return None
    return dim


def _carried(eqn: JaxprEqn, origins: Origins) -> Atom | None:
    """Return the operand whose elements an equation hands on, perhaps along other dims."""
    name = eqn.primitive.name
    if name == "select_n":
        return eqn.invars[1] if _keeps_first(eqn, origins) else None
    return eqn.invars[0] if name in (*_SAME_DIMS, *_UNIT_DIMS, "broadcast_in_dim") else None


def _keeps_first(eqn: JaxprEqn, origins: Origins) -> bool:
    """Return whether a selection is of the first case only, provided that is nowhere negative.

    So are indices from the end of a dim brought inside: select_n(i < 0, i, i + size).
    """
    which, first = eqn.invars[:2]
    always = origins.constant(which)
    if always is not None:
        return always.dtype == np.bool_ and not np.any(always)
    test = origins.eqn(which)
    if test is None or test.primitive.name != "lt" or test.invars[0] is not first:
        return False
    zero = test.invars[1]
    return isinstance(zero, Literal) and bool(np.all(zero.val == 0))


def _counted_dim(atom: Atom, origins: Origins) -> int | None:
    """Return the dim along which an iota or an equal constant counts; None for other values."""
    eqn, value = origins.eqn(atom), origins.constant(atom)
    if eqn is not None and eqn.primitive.name == "iota":
        dim = int(eqn.params["dimension"])
    elif value is not None and 1 <= value.ndim and value.size == max(value.shape):
        dim = value.shape.index(value.size)
        if value.dtype.kind not in "iu" or np.any(np.ravel(value) != np.arange(value.size)):
            return None
    else:
        return None
    return dim if _holds_places(atom, dim) else None


def _holds_places(atom: Atom, dim: int) -> bool:
    """Return whether the type holds every place along `dim` exactly, without going round."""
    if not jnp.issubdtype(dtype_of(atom), jnp.integer):
        return False
    info = jnp.iinfo(dtype_of(atom))  # type: ignore[no-untyped-call]
    return bool(shape_of(atom)[dim] - 1 <= info.max)


def _carried_dim(eqn: JaxprEqn, dim: int) -> int | None:
    """Return where an equation moves the whole dim `dim` of the operand that it carries."""
    name, params = eqn.primitive.name, eqn.params
    if name in _SAME_DIMS:
        return dim
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name == "broadcast_in_dim":
        place = int(params["broadcast_dimensions"][dim])
        return place if target[place] == source[dim] else None
    if name == "reshape" and params.get("dimensions") is not None:
        return None
    before, after = ([d for d, size in enumerate(s) if size != 1] for s in (source, target))
    if dim not in before or [source[d] for d in before] != [target[d] for d in after]:
        return None
    return after[before.index(dim)]


BATCHED_LOOKUPS = Rewrite(frozenset({"gather", *SCATTERS}), _batched)
