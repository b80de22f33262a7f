import gc
import os

import numpy as np
import pytest

from resharding.receive_memory import ReceiveMemory

SIZE = 1 << 20


def test_memory_is_lent_again_only_when_every_view_is_gone():
    memory = ReceiveMemory()
    first = memory.lend(SIZE)
    address = first.ctypes.data
    view = first[64:128].view(np.float32).reshape(4, 4)
    del first
    gc.collect()
    assert memory.lend(SIZE).ctypes.data != address
    del view
    gc.collect()
    assert memory.lend(SIZE).ctypes.data == address


def test_memory_that_a_jax_array_took_over_is_not_lent_again():
    jax = pytest.importorskip("jax", reason="needs the extra resharding[jax]")
    memory = ReceiveMemory()
    buffer = memory.lend(SIZE)
    buffer[:] = 7
    address = buffer.ctypes.data
    array = jax.device_put(buffer.view(np.float32), jax.devices()[0])
    expected = np.array(array)
    del buffer
    gc.collect()
    others = [memory.lend(SIZE) for _ in range(3)]
    for other in others:
        other[:] = 0
    np.testing.assert_array_equal(array, expected)
    if array.unsafe_buffer_pointer() == address:
        assert all(other.ctypes.data != address for other in others)


def test_buffers_are_aligned_and_of_the_asked_size():
    memory = ReceiveMemory()
    for size in (0, 1, 1000, SIZE, SIZE + 1):
        buffer = memory.lend(size)
        assert buffer.nbytes == size and buffer.flags.writeable
        assert not size or buffer.ctypes.data % 64 == 0


def test_idle_memory_is_limited():
    memory = ReceiveMemory(most_bytes=SIZE)
    buffers = [memory.lend(SIZE) for _ in range(4)]
    del buffers
    gc.collect()
    assert memory.idle_bytes == SIZE


def test_large_buffers_can_be_mapped_by_others_and_files_are_closed_with_them():
    memory = ReceiveMemory(most_bytes=0)
    assert memory.shared(memory.lend(SIZE // 2)) is None
    buffer = memory.lend(SIZE + 1)
    shared, other = memory.shared(buffer), memory.shared(memory.lend(SIZE))
    assert shared is not None and other is not None
    assert shared.size == 2 * SIZE and other.number != shared.number
    del other
    with open(f"/proc/self/fd/{shared.file}", "r+b") as file:
        file.write(b"hello")
        file.flush()
        assert bytes(buffer[:5]) == b"hello"
    del buffer
    gc.collect()
    assert memory.idle_bytes == 0
    assert not os.path.exists(f"/proc/self/fd/{shared.file}")
