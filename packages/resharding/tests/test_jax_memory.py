import ctypes
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax") is None:
    pytest.skip("needs the extra resharding[jax]", allow_module_level=True)

import jax
import jax.numpy as jnp

from resharding import Box, jax_memory
from resharding.jax_memory import JaxMemory, carrier_of
from resharding.nccl_library import NcclRanks, Operation, unique_id

DTYPES = [
    "bool",
    "int4",
    "uint8",
    "float8_e4m3fn",
    "bfloat16",
    "float32",
    "complex64",
]


def bits(array):
    """Return the elements as integers."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    return np.asarray(array.astype(jnp.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels_through_raw_memory_bit_for_bit(dtype):
    travels(dtype)


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128"])
def test_words_of_eight_bytes_and_more_travel_too(dtype):
    with jax.enable_x64(True):
        travels(dtype)


def test_complex_numbers_as_words_of_eight_bytes_do_not_travel_without_x64(monkeypatch):
    # the earlier version's mistake: half of the words are cut off where there is no uint64
    monkeypatch.setattr(jax_memory, "carrier_of", lambda dtype: jnp.dtype("uint64"))
    with pytest.raises((AssertionError, TypeError, ValueError)):
        travels("complex64")


@pytest.mark.parametrize("name", ["cut", "adopt"])
def test_a_staging_buffer_is_found(monkeypatch, name):
    real = getattr(JaxMemory, name)

    def staged(*given):
        return jax.tree.map(lambda array: array + 0, real(*given))

    monkeypatch.setattr(JaxMemory, name, staged)
    with pytest.raises(AssertionError):
        test_whole_tiles_are_sent_and_received_without_copies("float32")


def travels(dtype):
    """Send a tile in two halves through raw memory."""
    device = jax.devices()[0]
    memory = JaxMemory({7: device})
    values = np.random.default_rng(0).integers(0, 2, (6, 4))
    tile = jax.device_put(jnp.asarray(values).astype(dtype), device)
    if dtype.startswith("complex"):
        tile = tile * (2 + 3j)
    halves = [Box((1, 0), (4, 4)), Box((4, 0), (7, 4))]  # of a tile that begins at (1, 0)
    arrived = []
    for box, piece in zip(halves, memory.cut(tile, (1, 0), halves), strict=True):
        received = memory.empty(box.shape, dtype, 7)
        assert piece.dtype == received.dtype == carrier_of(dtype)
        source, target = memory.export(piece, None), memory.export(received, None)
        assert source.nbytes == target.nbytes
        ctypes.memmove(target.pointer, source.pointer, source.nbytes)
        arrived.append(memory.adopt(received, None))
    made = memory.join(arrived, (0, (0, 1)), dtype)
    assert made.dtype == dtype
    np.testing.assert_array_equal(bits(made), bits(tile))


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_whole_tiles_are_sent_and_received_without_copies(dtype):
    device = jax.devices()[0]
    memory = JaxMemory({7: device})
    tile = jax.device_put(jnp.arange(24).reshape(6, 4).astype(dtype), device)
    (piece,) = memory.cut(tile, (0, 0), [Box((0, 0), (6, 4))])
    assert memory.export(piece, None).pointer == tile.unsafe_buffer_pointer()
    received = memory.empty((6, 4), dtype, 7)
    target = memory.export(received, None)
    made = memory.join([memory.adopt(received, None)], 0, dtype)
    assert made.unsafe_buffer_pointer() == target.pointer == received.unsafe_buffer_pointer()


def test_an_array_whose_memory_is_exported_may_be_given_away():
    memory = JaxMemory({})
    array = jnp.arange(1 << 14, dtype=jnp.float32) + 0
    exported = memory.export(array, None)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    add(array).block_until_ready()
    seen = np.ctypeslib.as_array((ctypes.c_float * 4).from_address(exported.pointer))
    np.testing.assert_array_equal(seen, np.arange(4))


@pytest.mark.gpu
@pytest.mark.skipif(
    all(device.platform != "gpu" for device in jax.devices()), reason="needs a CUDA device"
)
def test_memory_of_a_gpu_is_adopted_after_an_event_of_another_stream():
    import cupy

    (device,) = jax.devices("gpu")[:1]
    memory = JaxMemory({0: device})
    with cupy.cuda.Device(memory.cuda_index(0)):
        stream = cupy.cuda.Stream(non_blocking=True)
        source = jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), device)
        received = memory.empty(source.shape, "float32", 0)
        given, into = memory.export(source, stream.ptr), memory.export(received, stream.ptr)
        cupy.cuda.runtime.memcpyAsync(into.pointer, given.pointer, given.nbytes, 3, stream.ptr)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
    made = memory.adopt(received, event)
    assert made.unsafe_buffer_pointer() == into.pointer
    np.testing.assert_array_equal(made, source)


@pytest.mark.gpu
@pytest.mark.skipif(
    all(device.platform != "gpu" for device in jax.devices()), reason="needs a CUDA device"
)
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "complex64", "int8", "bool", "float8_e4m3fn", "int4"]
)
def test_a_gpu_sends_to_itself_between_memory_of_jax(dtype):
    """One rank: what is being computed is sent, and programs read what has not yet arrived."""
    device = jax.devices("gpu")[0]
    memory = JaxMemory({0: device})
    ways = [
        NcclRanks(name, unique_id(), 1, {0: memory.cuda_index(0)}) for name in ("forth", "back")
    ]
    values = jnp.asarray(np.arange(1 << 22) % 2, jnp.dtype(dtype)).reshape(1 << 11, 1 << 11)
    (tile,) = memory.cut(values, (0, 0), [Box((0, 0), (1 << 11, 1 << 11))])
    for ranks in ways * 3:
        received = memory.empty(tile.shape, dtype, 0)
        slow = slowly(tile)
        given = memory.export(slow, ranks.streams[0].ptr)
        into = memory.export(received, ranks.streams[0].ptr)
        assert given.pointer == slow.unsafe_buffer_pointer()
        ranks.issue(
            [
                Operation(True, 0, 0, given.pointer, given.nbytes),
                Operation(False, 0, 0, into.pointer, into.nbytes),
            ],
            "to itself",
        )
        arrived = memory.adopt(received, ranks.event(0))
        assert arrived.unsafe_buffer_pointer() == into.pointer
        joined = memory.join([arrived], 0, dtype)
        assert joined.dtype == values.dtype
        assert (joined == values).all()
    for ranks in ways:
        ranks.check()
        ranks.abort()


@jax.jit
def slowly(tile):
    """Return `tile`, after products that take some milliseconds of a GPU."""
    ones = jnp.ones((1 << 12, 1 << 12))
    product = jax.lax.fori_loop(0, 20, lambda _, a: (a @ ones) * (1.0 / (1 << 12)), ones)
    return jnp.where(product[0, 0] > 0.5, tile, jnp.zeros_like(tile))
