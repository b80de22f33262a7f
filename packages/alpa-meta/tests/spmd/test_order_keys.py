import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.spmd.order_keys import from_order_keys, order_keys

ASCENDING = [-np.inf, -2.0, -1e-3, -0.0, 0.0, 0.5, 3.0, np.inf]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("nan_last", [True, False])
def test_keys_have_the_order_of_their_floats_with_nans_at_one_end(dtype, nan_last):
    value = jnp.asarray([*ASCENDING, np.nan, -np.nan], dtype)
    keys = order_keys(value, nan_last=nan_last)
    assert keys.dtype.itemsize == value.dtype.itemsize
    numbers, nans = np.asarray(keys[:-2], np.int64), np.asarray(keys[-2:], np.int64)
    assert (np.diff(numbers) > 0).all()
    assert (nans > numbers.max()).all() if nan_last else (nans < numbers.min()).all()
    back = np.asarray(from_order_keys(keys, value.dtype), np.float32)
    np.testing.assert_array_equal(back, np.asarray(value, np.float32))
    np.testing.assert_array_equal(np.signbit(back[:-2]), np.signbit(ASCENDING) | (back[:-2] < 0))
