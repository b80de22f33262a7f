"""Products that are summed over their batch dims: these dims are contracted.

`jax.vmap` of a gradient, summed over what it was mapped over, makes one gradient of each weight for
every part of the batch, and adds them up:

    reduce_sum(dot_general(x [n, b, i], y [n, b, o], batch n, contract b), n)

is dot_general(x, y, contract n and b), which makes one, transposed or not. XLA's simplifier does
the same, so that otherwise something else would be planned than what runs.
"""

from __future__ import annotations

import functools

from jax import lax

from alpa_meta.compat import JaxprEqn, Var, array_type, shape_of
from alpa_meta.operators.rewrites.replacement import replacement
from alpa_meta.operators.rewrites.rewrite import Origins, Rewrite


def _contracted(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn] | None:
    maker, axes = origins.only_read(eqn.invars[0]), eqn.params["axes"]
    order = tuple(range(len(shape_of(eqn.invars[0]))))
    if maker is not None and maker.primitive.name == "transpose":
        order = maker.params["permutation"]
        maker = origins.only_read(maker.invars[0])
    if maker is None or maker.primitive.name != "dot_general":
        return None
    contract, batch = maker.params["dimension_numbers"]
    summed = [order[axis] for axis in axes]
    if not summed or max(summed) >= len(batch[0]):
        return None
    numbers = (
        tuple((*own, *(dims[k] for k in summed)) for own, dims in zip(contract, batch)),
        tuple(tuple(dim for k, dim in enumerate(dims) if k not in summed) for dims in batch),
    )
    params = {**maker.params, "dimension_numbers": numbers}
    kept = sorted(dim for dim in order if dim not in summed)
    left = tuple(kept.index(dim) for dim in order if dim not in summed)
    if left == tuple(sorted(left)):
        return [maker.replace(outvars=eqn.outvars, params=params)]
    (result,) = eqn.outvars
    shape = [0] * len(left)
    for size, dim in zip(shape_of(result), left, strict=True):
        shape[dim] = size
    product = Var(array_type(result).update(shape=tuple(shape)))
    turned = functools.partial(lax.transpose, permutation=left)
    made = maker.replace(outvars=[product], params=params)
    return [made, *replacement(turned, [product], [result], eqn)]


SUMMED_PRODUCTS = Rewrite(frozenset({"reduce_sum"}), _contracted)
