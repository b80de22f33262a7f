import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mesh_runtime.array_store import (
    CHUNK_BYTES,
    ArrayReader,
    ArrayWriter,
    Part,
    StoredArray,
    StoreError,
    chunk_shape,
    file_sums,
    tile_boxes,
)

ts = pytest.importorskip("tensorstore", reason="needs the extra mesh-runtime[checkpoint]")


def stored(name, array, tiles=None):
    tiles = tile_boxes(array) if tiles is None else tiles
    chunks = chunk_shape(array.shape, array.dtype.itemsize, tiles)
    return StoredArray(name, array.shape, str(array.dtype), chunks)


def all_of(one):
    return Part(one, (0,) * len(one.shape), one.shape)


def grid(*shape, start=0):
    devices = jax.devices()[start : start + int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("a", "b")[: len(shape)])


def merged(folder, process):
    """Merge one process's database as orbax does."""
    base, root = folder / f"ocdbt.process_{process}", folder
    context = ts.Context()
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
    child, parent = (
        ts.KvStore.open(
            {"driver": "ocdbt", "base": f"file://{place}/", "config": config}, context=context
        ).result()
        for place in (base, root)
    )
    with ts.Transaction(atomic=True) as transaction:
        child.experimental_copy_range_to(parent.with_transaction(transaction)).result()


def test_an_array_written_by_tiles_is_read_in_another_layout(tmp_path):
    values = jnp.arange(48.0).reshape(8, 6).astype(jnp.bfloat16)
    array = jax.device_put(values, NamedSharding(grid(2, 2), P("a", "b")))
    one = stored("w", array)
    assert one.chunks == (4, 3)
    writer = ArrayWriter(tmp_path, "here", 1 << 20)
    writer.write([(all_of(one), array)])
    sums = writer.finish()
    assert sums == file_sums(tmp_path, tmp_path)
    merged(tmp_path, "here")
    reader = ArrayReader(tmp_path)
    assert reader.part(all_of(one)).tobytes() == np.asarray(values).tobytes()
    other = NamedSharding(grid(3, start=4), P(None, "a"))
    rows = Part(one, (2, 0), (4, 6))
    whole, part = reader.sharded([(all_of(one), other), (rows, other)], 1)
    assert whole.sharding == other
    np.testing.assert_array_equal(whole, values)
    np.testing.assert_array_equal(part, values[2:6])


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3fn", "float8_e8m0fnu", "bool", "complex64"]
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    array = jnp.asarray([[1, 0, 2], [1, 1, 4]]).astype(dtype)
    one = stored("x", array)
    writer = ArrayWriter(tmp_path, "here", 1)
    writer.write([(all_of(one), array)])
    writer.finish()
    merged(tmp_path, "here")
    found = ArrayReader(tmp_path).part(all_of(one))
    assert found.dtype == array.dtype
    assert found.tobytes() == np.asarray(array).tobytes()


def test_what_is_written_is_what_the_array_was_when_it_was_given(tmp_path):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    array = jax.device_put(jnp.ones((4, 1000)), NamedSharding(grid(4), P("a")))
    pointer = array.addressable_shards[0].data.unsafe_buffer_pointer()
    one = stored("x", array)
    writer = ArrayWriter(tmp_path, "here", 1 << 20)
    writer.write([(all_of(one), array)])
    after = double(array)
    assert array.is_deleted()  # the step overwrote it, as without a checkpoint
    assert after.addressable_shards[0].data.unsafe_buffer_pointer() == pointer
    writer.finish()
    merged(tmp_path, "here")
    assert (ArrayReader(tmp_path).part(all_of(one)) == 1).all()


def test_chunks_end_where_tiles_do_and_are_bounded():
    assert chunk_shape((), 4, [()]) == ()
    assert chunk_shape((0, 3), 4, [((0, 0), (0, 3))]) == (1, 3)
    # pieces of 3 and 5 layers
    assert chunk_shape((8, 4), 4, [((0, 3), (0, 4)), ((3, 8), (0, 4))]) == (1, 4)
    # a prime number of rows that no tile cuts: any chunk will do
    rows, columns = chunk_shape((50021, 4096), 4, [((0, 50021), (0, 4096))])
    assert rows * columns * 4 <= CHUNK_BYTES < (rows + 100) * columns * 4
    # a cut dim is split into whole parts of a tile
    rows, _ = chunk_shape((32768, 4096), 4, [((0, 16384), (0, 4096)), ((16384, 32768), (0, 4096))])
    assert rows == 2048


def test_what_cannot_be_written_or_read_is_said(tmp_path):
    array = jnp.ones(3)
    one = stored("x", array)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="file: cannot be written"):
        writer = ArrayWriter(tmp_path / "file", "here", 1)
        writer.write([(all_of(one), array)])
        writer.finish()
    with pytest.raises(StoreError, match="'x' cannot be read"):
        ArrayReader(tmp_path).part(all_of(one))


def test_an_array_of_another_shape_than_expected_is_refused(tmp_path):
    array = jnp.ones((3, 2))
    writer = ArrayWriter(tmp_path, "here", 1)
    writer.write([(all_of(stored("x", array)), array)])
    writer.finish()
    merged(tmp_path, "here")
    for shape, dtype in (((3, 3), "float32"), ((3, 2), "int32")):
        with pytest.raises(StoreError, match="'x' cannot be read"):
            ArrayReader(tmp_path).part(all_of(StoredArray("x", shape, dtype)))


def test_a_tile_waits_until_earlier_ones_are_written(tmp_path):
    sharding = SingleDeviceSharding(jax.devices()[0])
    arrays = [jax.device_put(np.full(1000, k, np.float32), sharding) for k in range(8)]
    parts = [(all_of(stored(f"x{k}", one)), one) for k, one in enumerate(arrays)]
    writer = ArrayWriter(tmp_path, "here", 4000)
    thread = threading.Thread(target=writer.write, args=(parts,))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    writer.finish()
    merged(tmp_path, "here")
    reader = ArrayReader(tmp_path)
    assert [int(reader.part(part)[0]) for part, _ in parts] == list(range(8))
