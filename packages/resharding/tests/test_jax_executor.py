from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax") is None:
    pytest.skip("needs the extra resharding[jax]", allow_module_level=True)

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resharding import device_tiles
from resharding.jax_executor import placed_tensor, reshard

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 8,
    reason="needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8",
)


def mesh(first, shape, names):
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[first : first + count]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def layouts():
    a, b = mesh(0, (2, 2), ("x", "y")), mesh(4, (2, 2), ("p", "q"))
    c, d = mesh(0, (8,), ("z",)), mesh(3, (3,), ("t",))
    return [
        NamedSharding(a, P("x", "y")),
        NamedSharding(a, P(("y", "x"))),
        NamedSharding(b, P(None, ("p", "q"))),
        NamedSharding(b, P("q")),
        NamedSharding(c, P("z")),
        NamedSharding(c, P(None, "z")),
        NamedSharding(d, P()),
        SingleDeviceSharding(jax.devices()[5]),
    ]


def test_tiles_are_those_of_jax_for_every_layout():
    for sharding in layouts():
        tiles = device_tiles(placed_tensor(sharding, 2), (24, 16), "source")
        for device, index in sharding.devices_indices_map((24, 16)).items():
            expected = tuple(part.indices(n)[:2] for part, n in zip(index, (24, 16), strict=True))
            box = tiles[device.id]
            assert tuple(zip(box.start, box.stop, strict=True)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_every_pair_of_layouts_moves_bit_for_bit(dtype):
    values = np.random.default_rng(0).integers(0, 2, (24, 16)).astype(np.float32)
    values[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
    whole = jax.numpy.asarray(values).astype(dtype)
    expected = np.asarray(whole).tobytes()
    for source in layouts():
        array = jax.device_put(whole, source)
        for target in layouts():
            moved = reshard(array, target)
            assert moved.sharding == target and moved.dtype == whole.dtype
            assert np.asarray(moved).tobytes() == expected


def test_scalars_and_pytrees_move_with_one_or_many_shardings():
    a, b = layouts()[0], layouts()[3]
    tree = {
        "w": jax.device_put(np.ones((8, 8)), a),
        "n": jax.device_put(3.0, NamedSharding(a.mesh, P())),
    }
    moved = reshard(tree, {"w": b, "n": NamedSharding(b.mesh, P())})
    assert moved["w"].sharding == b and float(moved["n"]) == 3.0
    assert reshard(tree, NamedSharding(b.mesh, P()))["w"].sharding.is_fully_replicated


def test_an_array_already_in_place_is_returned_as_it_is():
    array = jax.device_put(np.ones((8, 8)), layouts()[0])
    assert reshard(array, layouts()[0]) is array


def test_assembled_tiles_are_not_copied_again():
    array = jax.device_put(np.ones((1024, 64), np.float32), layouts()[0])
    moved = reshard(array, layouts()[2])
    pointers = [shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards]
    assert all(pointer % 64 == 0 for pointer in pointers)


def test_unreduced_and_unconstrained_layouts_are_refused():
    a = mesh(0, (2, 2), ("x", "y"))
    array = jax.device_put(np.ones((8, 8)), NamedSharding(a, P("x")))
    with pytest.raises(ValueError, match="leaves a dim unconstrained"):
        reshard(array, NamedSharding(a, P(P.UNCONSTRAINED)))


def test_layouts_without_a_mesh_are_refused_with_advice():
    with pytest.raises(TypeError, match="needs a NamedSharding or SingleDeviceSharding"):
        placed_tensor(object(), 1)
