import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from mesh_runtime.layout import Layout, array_of, host_tiles, plain_spec, whole_of
from mesh_runtime.pieces import Box

VALUE = np.arange(32, dtype=np.float32).reshape(4, 8)
CUT = Layout((2, 2), ("data", "model"), ("data", "model"))


def test_each_host_gets_the_tiles_of_its_own_devices_and_each_tile_once():
    first, second = host_tiles(VALUE, CUT, 2)
    assert first.shape == (4, 8)
    assert [box for box, _ in first.tiles] == [((0, 2), (0, 4)), ((0, 2), (4, 8))]
    np.testing.assert_array_equal(second.tiles[1][1], VALUE[2:, 4:])
    (whole,) = host_tiles(VALUE, Layout((2, 2), ("data", "model")), 1)
    assert len(whole.tiles) == 1  # four devices share it


def test_tiles_are_joined_to_the_whole():
    tiles = [tile for host in host_tiles(VALUE, CUT, 2) for tile in host.tiles]
    np.testing.assert_array_equal(whole_of(tiles), VALUE)
    scalar = np.float32(3)
    assert whole_of([((), np.asarray(scalar))]) == scalar
    empty = np.zeros((0, 8), np.float32)
    assert whole_of([(((0, 0), (0, 8)), empty)]).shape == (0, 8)


def test_a_dim_that_does_not_divide_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="dim 0 of a value of shape .* cannot be cut 2 ways"):
        host_tiles(VALUE[:3], CUT, 2)


def test_a_layout_is_a_sharding_of_devices_or_of_none():
    assert CUT.sharding(jax.devices()[:4]).shard_shape((4, 8)) == (2, 4)
    assert isinstance(CUT.sharding().mesh, AbstractMesh)
    assert CUT.sharding().spec == PartitionSpec("data", "model")


def test_specs_become_plain_data():
    spec = PartitionSpec(None, ("data", "model"), "x")
    assert plain_spec(spec, "here") == (None, ("data", "model"), "x")
    with pytest.raises(ValueError, match="here leaves a dim unconstrained"):
        plain_spec(PartitionSpec(PartitionSpec.UNCONSTRAINED), "here")


def test_the_share_of_all_microbatches_is_that_of_each():
    value = np.arange(96, dtype=np.float32).reshape(3, 4, 8)
    for host, share in enumerate(host_tiles(value, CUT, 2, count=3)):
        parts = share.parts("x")
        assert list(parts) == ["x@0", "x@1", "x@2"] and share.nbytes == value.nbytes // 2
        for k, part in enumerate(parts.values()):
            alone = host_tiles(value[k], CUT, 2)[host]
            assert part.shape == alone.shape
            for (box, tile), (other, expected) in zip(part.tiles, alone.tiles, strict=True):
                assert box == other
                np.testing.assert_array_equal(tile, expected)
    alone = host_tiles(value[0], CUT, 1)[0]
    assert alone.parts("w") == {"w": alone}


def test_an_array_is_made_of_tiles_without_copying_aligned_memory():
    raw = np.zeros(2 * 4 * 16 + 16, np.float32)
    first = -raw.ctypes.data % 64 // 4
    memory = raw[first : first + 128].reshape(2, 4, 16)
    memory[...] = np.arange(128).reshape(2, 4, 16)
    halves = Layout((2,), ("x",), ("x",)).sharding(jax.devices()[:2])
    tiles: dict[Box, np.ndarray]
    tiles = {((0, 4), (0, 16)): memory[0], ((4, 8), (0, 16)): memory[1]}
    made = array_of((8, 16), halves, tiles)
    np.testing.assert_array_equal(made, memory.reshape(8, 16))
    where = [shard.data.unsafe_buffer_pointer() for shard in made.addressable_shards]
    assert where == [memory[0].ctypes.data, memory[1].ctypes.data]
