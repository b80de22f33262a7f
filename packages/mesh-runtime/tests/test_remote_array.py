import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_runtime import RemoteArray, StaleArrayError, fetched
from mesh_runtime.layout import Layout
from mesh_runtime.remote_array import Buffer

LAYOUT = Layout((2,), ("x",), ("x",))


class Shelf:
    """An owner that keeps its arrays in this process and notes what is asked of it."""

    def __init__(self):
        self.arrays, self.requests, self.released = {}, [], []

    def handle(self, value, number=1):
        value = np.asarray(value)
        self.arrays[number] = value
        return RemoteArray(Buffer(self, number, [0], value.shape, value.dtype, LAYOUT))

    def fetch(self, buffers):
        self.requests.append([buffer.number for buffer in buffers])
        return [self.arrays[buffer.number] for buffer in buffers]

    def release(self, number):
        self.released.append(number)


@pytest.fixture
def shelf():
    return Shelf()


def test_a_handle_says_what_it_stands_for_without_fetching_it(shelf):
    handle = shelf.handle(np.ones((4, 3), np.float32))
    assert (handle.shape, handle.dtype, handle.ndim, handle.size) == ((4, 3), np.float32, 2, 12)
    assert (handle.nbytes, len(handle), handle.meshes, handle.owner) == (48, 4, (0,), shelf)
    assert handle.sharding.shard_shape((4, 3)) == (2, 3)
    assert repr(handle) == "RemoteArray(float32[4, 3] on mesh 0)"
    assert jax.tree.leaves({"w": handle}) == [handle]
    assert handle.block_until_ready() is handle and shelf.requests == []


def test_it_becomes_an_array_where_it_is_asked_to(shelf):
    whole = np.arange(6, dtype=np.float32).reshape(2, 3)
    handle = shelf.handle(whole)
    for found in (np.asarray(handle), jnp.asarray(handle), jax.device_get(handle), handle.fetch()):
        np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(handle[1], whole[1])
    np.testing.assert_array_equal(handle + 1, whole + 1)
    np.testing.assert_array_equal(2 * handle, 2 * whole)
    np.testing.assert_array_equal(jnp.sum(jnp.asarray(handle)), whole.sum())
    assert np.asarray(handle, np.int32).dtype == np.int32


def test_a_number_is_a_number(shelf):
    loss = shelf.handle(np.float32(1.5))
    assert float(loss) == loss.item() == 1.5 and bool(loss) and int(loss) == 1
    assert f"{loss:.3f}" == "1.500" and str(loss) == "1.5" and loss > 1
    assert range(3)[shelf.handle(np.int32(2), 2)] == 2
    assert round(shelf.handle(np.float32(2.256), 3), 1) == 2.3
    with pytest.raises(TypeError, match=r"len\(\) of an array without dims"):
        len(loss)


def test_it_has_the_methods_of_numpy_s_arrays_and_no_others(shelf):
    whole = np.arange(6, dtype=np.float32).reshape(2, 3)
    handle = shelf.handle(whole)
    assert handle.mean() == np.mean(handle) == 2.5 and handle.tolist() == whole.tolist()
    assert handle.T.shape == (3, 2) and handle.real is not None
    assert handle.astype(np.int32).dtype == np.int32
    shelf.requests.clear()
    for name in ("addressable_shards", "_value", "__array_interface__", "unsafe_buffer_pointer"):
        assert not hasattr(handle, name)
    assert shelf.requests == []


def test_a_handle_is_neither_pickled_nor_copied_with_a_reason(shelf):
    handle = shelf.handle([1.0, 2.0])
    with pytest.raises(TypeError, match=r"cannot be pickled or copied; take step\.gather"):
        copy.deepcopy({"w": handle})
    assert copy.copy(handle) is handle


def test_several_are_fetched_by_one_request_each_array_once(shelf):
    first, second = shelf.handle([1, 2], 1), shelf.handle([3, 4], 2)
    found = fetched([first, second, first])
    assert [list(one) for one in found] == [[1, 2], [3, 4], [1, 2]]
    assert shelf.requests == [[1, 2]]


def test_what_a_step_overwrote_is_refused_with_the_reason(shelf):
    handle = shelf.handle([1.0])
    handle.buffer.gone = "it was given away to step 3 as 'w'"
    assert handle.is_deleted() and repr(handle) == str(handle)
    with pytest.raises(StaleArrayError, match="gone.: it was given away to step 3 as 'w'"):
        np.asarray(handle)


def test_words_stand_for_random_keys(shelf):
    key = jax.random.key(7)
    handle = shelf.handle(jax.random.key_data(key)).as_keys("threefry2x32")
    assert (handle.shape, handle.dtype) == (key.shape, key.dtype)
    assert jax.random.uniform(handle.fetch()) == jax.random.uniform(key)


def test_an_array_is_released_with_its_last_handle(shelf):
    handle = shelf.handle([1])
    other = handle.as_keys("threefry2x32")
    del handle
    assert shelf.released == []
    del other
    assert shelf.released == [1]


def test_a_value_that_was_sent_along_needs_no_request(shelf):
    buffer = Buffer(shelf, 0, [1], (), "float32", LAYOUT, np.asarray(2, np.float32))
    assert float(RemoteArray(buffer)) == 2 and shelf.requests == []
    del buffer
    assert shelf.released == []
