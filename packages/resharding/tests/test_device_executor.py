from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("jax") is None:
    pytest.skip("needs the extra resharding[jax]", allow_module_level=True)

import jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resharding import Network, plan
from resharding.cases import random_task
from resharding.device_executor import DeviceExecutor
from resharding.device_order import join_order
from resharding.jax_executor import reshard
from resharding.slices import Box
from resharding.strategies import STRATEGIES

pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 8,
    reason="needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8",
)


def mesh(first, shape, names):
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape), names)


def layouts():
    a, b = mesh(0, (2, 2), ("x", "y")), mesh(4, (2, 2), ("p", "q"))
    return [
        NamedSharding(a, P("x", "y")),
        NamedSharding(b, P(None, ("p", "q"))),
        NamedSharding(b, P("q")),
        NamedSharding(mesh(3, (3,), ("t",)), P()),
        SingleDeviceSharding(jax.devices()[5]),
    ]


@pytest.fixture
def gathers(monkeypatch):
    """Return a list that grows whenever an array is fetched into host memory."""
    found: list[tuple[int, ...]] = []
    kind: Any = type(jax.numpy.zeros(1))
    fetch = kind._value

    def counted(array):
        found.append(array.shape)
        return fetch.fget(array)

    monkeypatch.setattr(kind, "_value", property(counted))
    return found


@pytest.mark.sample(dtype=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "uint2"])
def test_no_pair_of_layouts_passes_through_the_host(gathers, dtype):
    values = np.random.default_rng(0).integers(0, 2, (24, 12)).astype(np.float32)
    whole = jax.numpy.asarray(values).astype(dtype)
    expected = np.asarray(whole)
    for source in layouts():
        array = jax.device_put(whole, source)
        for target in layouts():
            before = len(gathers)
            moved = reshard(array, target, through="device")
            assert len(gathers) == before
            assert moved.sharding == target and moved.dtype == whole.dtype
            np.testing.assert_array_equal(np.asarray(moved), expected)


def test_device_put_of_a_changed_layout_is_counted_as_a_gather(gathers):
    # what the counter would see if the programs of the devices were not used
    source, target = layouts()[:2]
    jax.device_put(jax.device_put(np.ones((24, 12)), source), target).block_until_ready()
    assert len(gathers) == 1


def test_bits_of_floats_survive(gathers):
    values = np.zeros((8, 8), np.float32)
    values[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
    values.view(np.uint32)[1, 0] = 0x7FA00001  # a signalling NaN
    moved = reshard(jax.device_put(values, layouts()[0]), layouts()[1], through="device")
    assert np.asarray(moved).tobytes() == values.tobytes()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(list(STRATEGIES)))
def test_plans_of_every_strategy_give_the_target_tiles(seed, overlap, strategy):
    task = random_task(seed, overlap=overlap, longest=5)
    executor = DeviceExecutor(plan(task, Network(), strategy))
    whole = np.arange(task.tensor.size, dtype=np.int32).reshape(task.tensor.shape)
    origin = (0,) * whole.ndim
    numbers = sorted({*task.source.devices, *task.target.devices})
    devices = {number: jax.devices()[k % 2] for k, number in enumerate(numbers)}
    shards = {
        device: jax.device_put(whole[box.within(origin)], devices[device])
        for device, box in executor.source_tiles.items()
    }
    results = executor.run(shards, devices)
    for (device, box), tile in zip(executor.target_tiles.items(), results, strict=True):
        assert tile.devices() == {devices[device]}
        np.testing.assert_array_equal(np.asarray(tile), whole[box.within(origin)])


def test_pieces_are_joined_along_borders_that_cut_none_of_them():
    tile = Box((0, 0), (4, 4))
    boxes = (Box((0, 0), (2, 1)), Box((0, 1), (2, 4)), Box((2, 0), (4, 4)))
    assert join_order(tile, boxes) == (0, ((1, (0, 1)), 2))
    windmill = (
        Box((0, 0), (1, 3)),
        Box((0, 3), (3, 4)),
        Box((3, 1), (4, 4)),
        Box((1, 0), (4, 1)),
        Box((1, 1), (3, 3)),
    )
    with pytest.raises(ValueError, match="the 5 pieces of the tile .* interlock"):
        join_order(tile, windmill)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="through must be 'auto', 'device' or 'host'"):
        reshard(jax.numpy.ones(4), layouts()[0], through="disk")
