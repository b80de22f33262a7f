"""Floats as integers of the same order, so that comparing integers compares floats and NaNs.

The bits of floats, read as signed integers, are in order where the sign bit is clear, and in
reverse order where it is set: there, all bits but the sign are flipped. NaNs lie beyond the
infinities.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def order_keys(value: Any, *, nan_last: bool) -> Any:
    """Return the keys of `value`, with all NaNs above every number, or below if not `nan_last`."""
    nan = jnp.full((), jnp.nan, value.dtype)
    canonical = jnp.where(jnp.isnan(value), nan if nan_last else -nan, value)
    return _flipped(lax.bitcast_convert_type(canonical, _integer(value.dtype)))


def from_order_keys(keys: Any, dtype: Any) -> Any:
    """Return the floats of `dtype` that have `keys`."""
    return lax.bitcast_convert_type(_flipped(keys), dtype)


def _integer(dtype: Any) -> Any:
    return jnp.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


def _flipped(bits: Any) -> Any:
    info = jnp.iinfo(bits.dtype)  # type: ignore[no-untyped-call]
    return jnp.where(bits < 0, bits ^ jnp.asarray(info.max, bits.dtype), bits)
