import gc
import sys

import jax
import numpy as np
import pytest

from mesh_runtime.driver_memory import DriverMemory, MappedMemory
from mesh_runtime.layout import HostTiles, Layout, array_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs files in memory")


def halves(start, dtype=np.float32):
    """Return a share of two microbatches of (4, 64), cut into two tiles, and the whole."""
    whole = np.arange(start, start + 512).astype(dtype).reshape(2, 4, 64)
    boxes = [((0, 4), (0, 32)), ((0, 4), (32, 64))]
    return HostTiles((4, 64), [(box, whole[:, :, slice(*box[1])]) for box in boxes], 2), whole


@pytest.mark.parametrize("dtype", [np.float32, np.int8, jax.numpy.bfloat16])
def test_a_share_is_mapped_tile_by_tile(dtype):
    driver, worker = DriverMemory(), MappedMemory()
    given, whole = halves(0, dtype)
    found = worker.tiles(driver.share(given, 1))
    assert (found.shape, found.count) == ((4, 64), 2)
    for box, tile in found.tiles:
        np.testing.assert_array_equal(tile, whole[:, :, slice(*box[1])])
        assert tile.ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            tile[...] = 0


def test_memory_is_used_again_when_no_array_of_any_worker_refers_to_it():
    driver, workers = DriverMemory(), (MappedMemory(), MappedMemory())
    first, whole = halves(0)
    shared = driver.share(first, 2)
    sharding = Layout((1,), ("x",)).sharding(jax.devices()[:1])
    kept = []
    for worker in workers:
        (box, tile), _ = worker.tiles(shared).parts("x")["x@1"].tiles
        kept.append(array_of((4, 32), sharding, {((0, 4), (0, 32)): tile}))
    del tile, _
    gc.collect()
    assert [worker.take_left() for worker in workers] == [(), ()]
    others = driver.share(halves(1000)[0], 1)
    assert others.place != shared.place
    for array in kept:
        np.testing.assert_array_equal(array, whole[1, :, :32])
    del array
    kept.pop().block_until_ready()
    gc.collect()
    assert [worker.take_left() for worker in workers] == [(), (shared.place.number,)]
    driver.give_back([shared.place.number])
    assert driver.share(halves(0)[0], 1).place not in (shared.place, others.place)
    kept.pop().block_until_ready()
    gc.collect()
    driver.give_back(workers[0].take_left())
    assert driver.share(halves(0)[0], 1).place == shared.place


def test_a_file_of_somebody_else_is_not_taken_for_the_drivers():
    driver, worker = DriverMemory(), MappedMemory()
    place, token = driver.probe()
    assert worker.reaches(place, token)
    assert not MappedMemory().reaches(place, token[:-1] + b"?")
    other, _ = DriverMemory().probe()
    assert not worker.reaches(other, token)  # closed by now, or another file
