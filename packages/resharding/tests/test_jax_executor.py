import functools
import random
import sys
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("jax") is None:
    pytest.skip("needs the extra resharding[jax]", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import resharding
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


def random_layout(draw, shape):
    """Return a layout on a random mesh of devices in random order."""
    grid = draw.choice([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 4), (4, 2), (2, 2, 2)])
    devices = draw.sample(jax.devices(), int(np.prod(grid)))
    names = "abc"[: len(grid)]
    entries, free = [], list(names)
    for extent in shape:
        axes = draw.sample(free, draw.randint(0, len(free)))
        while extent % int(np.prod([grid[names.index(name)] for name in axes], dtype=int)):
            axes.pop()
        free = [name for name in free if name not in axes]
        entries.append(tuple(axes) if axes else None)
    types = (AxisType.Auto,) * len(grid)
    made = Mesh(np.array(devices).reshape(grid), tuple(names), axis_types=types)
    return NamedSharding(made, P(*entries))


@pytest.mark.parametrize("through", ["host", "device"])
def test_any_pair_of_meshes_in_any_order_of_devices(through):
    draw = random.Random(0)
    for _ in range(40):
        shape = tuple(draw.choice([1, 4, 6, 12, 24]) for _ in range(draw.randint(0, 3)))
        values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        source, target = random_layout(draw, shape), random_layout(draw, shape)
        moved = resharding.reshard(jax.device_put(values, source), target, through=through)
        assert moved.sharding == target
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


@pytest.mark.parametrize("through", ["auto", "device"])
def test_keys_memory_kinds_devices_and_host_arrays_move_too(through):
    a, b = layouts()[0], layouts()[3]
    pinned = b.with_memory_kind("pinned_host")
    array = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), a)
    there = reshard(array, pinned, through=through)
    assert there.sharding == pinned
    back = reshard(there, a, through=through)
    assert back.sharding == a
    np.testing.assert_array_equal(np.asarray(back), np.asarray(array))
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), NamedSharding(a.mesh, P("x")))
    moved = reshard(keys, NamedSharding(b.mesh, P("q")), through=through)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    assert reshard(array, jax.devices()[6], through=through).devices() == {jax.devices()[6]}
    assert reshard(np.ones((8, 8)), b, through=through).sharding == b


def test_a_sharding_stands_for_all_arrays_below_it():
    a, b = layouts()[0], layouts()[3]
    tree = {"layer": {"w": jax.device_put(np.ones((8, 8)), a), "none": None}, "n": 1.0}
    moved = reshard(tree, {"layer": b, "n": NamedSharding(b.mesh, P())})
    assert moved["layer"]["w"].sharding == b and moved["layer"]["none"] is None
    assert moved["n"].sharding.is_fully_replicated


def test_unreduced_targets_and_unconstrained_layouts_are_refused():
    a = mesh(0, (2, 2), ("x", "y"))
    array = jax.device_put(np.ones((8, 8)), NamedSharding(a, P("x")))
    with pytest.raises(ValueError, match="leaves a dim unconstrained"):
        reshard(array, NamedSharding(a, P(P.UNCONSTRAINED)))
    explicit = Mesh(a.devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match="is unreduced over .*'y'.* not taken apart"):
        reshard(array, NamedSharding(explicit, P(None, unreduced={"y"})))


def test_without_jax_reshard_says_what_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "resharding.jax_executor")
    monkeypatch.delattr(resharding, "jax_executor")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs jax: pip install 'resharding\[jax\]'"):
        resharding.reshard(1.0, None)


@pytest.mark.parametrize("to", ["cpu", P("x"), np.ones(1)])
def test_what_is_no_layout_is_refused_with_advice(to):
    with pytest.raises(TypeError, match=r"needs a jax sharding or device .*NamedSharding\(mesh, "):
        reshard(np.ones(4), to)


def test_traced_values_are_refused_with_advice():
    here = SingleDeviceSharding(jax.devices()[0])
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match=r"traced value of type .*float32.*call it outside jit"):
            transform(lambda array: reshard(array, here).sum())(np.ones((2, 2), np.float32))


def test_layouts_without_a_mesh_are_refused_with_advice():
    with pytest.raises(TypeError, match="needs a NamedSharding or SingleDeviceSharding"):
        placed_tensor(object(), 1)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("shape", [(8, 6), (3, 5)])
@pytest.mark.parametrize("through", ["device", "host"])
def test_an_unreduced_array_is_summed_up_and_moved(shape, through):
    here, there = (
        jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    left = jax.device_put(
        np.arange(shape[0] * 4, dtype=np.float32).reshape(shape[0], 4),
        NamedSharding(here, P(None, "x")),
    )
    right = jax.device_put(np.ones((4, shape[1]), np.float32), NamedSharding(here, P("x", None)))
    product = functools.partial(
        jnp.einsum, "ij,jk->ik", out_sharding=P(None, None, unreduced={"x"})
    )
    with jax.set_mesh(here):
        summands = jax.jit(product)(left, right)
    target = NamedSharding(there, P("y" if shape[0] % 2 == 0 else None, None))
    found = reshard(summands, target, through=through)
    assert found.sharding == target
    np.testing.assert_array_equal(np.asarray(found), np.asarray(left) @ np.asarray(right))
