"""Floats as integers of the same order, so that comparing integers compares floats and NaNs.

The bits of floats, read as signed integers, are in order where the sign bit is clear, and in
reverse order where it is set: there, all bits but the sign are flipped. NaNs lie beyond the
infinities.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from alpa_meta.types import DType


def order_keys(value: Array, *, nan_last: bool) -> Array:
    """Return the keys of `value`, with all NaNs above every number, or below if not `nan_last`."""
    nan = jnp.full((), jnp.nan, value.dtype)
    canonical = jnp.where(jnp.isnan(value), nan if nan_last else -nan, value)
    return _flipped(lax.bitcast_convert_type(canonical, _integer(value.dtype)))


def from_order_keys(keys: Array, dtype: DType) -> Array:
    """Return the floats of `dtype` that have `keys`."""
    return lax.bitcast_convert_type(_flipped(keys), dtype)


def _integer(dtype: DType) -> DType:
    return jnp.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


def _flipped(bits: Array) -> Array:
    info = jnp.iinfo(bits.dtype)  # type: ignore[no-untyped-call]
    return jnp.where(bits < 0, bits ^ jnp.asarray(info.max, bits.dtype), bits)
