"""Edges of a sharded dim, read from the neighbouring devices."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from alpa_meta.operators.operator import LocalCall


def exchange(
    call: LocalCall,
    value: Array,
    axes: tuple[str, ...],
    dim: int,
    low: int,
    high: int,
    filler: ArrayLike = 0,
) -> Array:
    """Return local `value` with `low` elements before and `high` after it along `dim`.

    They come from the neighbours along `axes`; beyond the ends of the whole tensor they are
    `filler`. A halo longer than a device's part takes a gather of the whole dim instead.
    """
    size = value.shape[dim]
    if max(low, high) > size:
        whole = call.collectives.all_gather(value, axes, dim, "halo longer than a part")
        widths = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(value.ndim)]
        padded = lax.pad(whole, jnp.asarray(filler, value.dtype), widths)
        start = call.index(axes) * size
        return lax.dynamic_slice_in_dim(padded, start, size + low + high, dim)
    parts = [value]
    if low:
        edge = lax.slice_in_dim(value, size - low, size, axis=dim)
        parts.insert(0, _received(call, edge, axes, 1, filler))
    if high:
        edge = lax.slice_in_dim(value, 0, high, axis=dim)
        parts.append(_received(call, edge, axes, -1, filler))
    return lax.concatenate(parts, dim) if len(parts) > 1 else value


def _received(
    call: LocalCall, edge: Array, axes: tuple[str, ...], offset: int, filler: ArrayLike
) -> Array:
    """Return the edge of the device `offset` positions before; `filler` beyond the ends."""
    received = call.collectives.shift(edge, axes, offset, "halo")
    if isinstance(filler, int) and filler == 0:
        return received
    position = call.index(axes)
    outside = position == (0 if offset > 0 else call.shards(axes) - 1)
    return jnp.where(outside, jnp.asarray(filler, edge.dtype), received)
