"""Helpers every test of the package uses: shards of a known array, and tasks by short notation."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from fake_cuda import World

from alpa_interchange.reshard import ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType, dtype_bytes
from resharding import device_tiles
from resharding.notation import place

AXES = {"R": (), "S0": ("host",), "S1": ("device",), "S01": ("host", "device")}


@pytest.fixture
def make_task():
    """Return a function of shape, then (hosts, devices) and spec of source and of target."""

    def make(shape, source, source_spec, target, target_spec, first_host=None, dtype="float32"):
        def spec(text):
            return ShardingSpec(tuple(AXES[part] for part in text.split()))

        hosts, devices = target
        target_host = source[0] if first_host is None else first_host
        return ReshardingTask(
            tensor=TensorType(shape, dtype),
            source=place(spec(source_spec), *source),
            target=place(spec(target_spec), hosts, devices, target_host),
        )

    return make


@pytest.fixture
def make_shards():
    """Return a function that gives (source shards, expected target shards) of random bytes."""

    def make(task):
        random = np.random.default_rng(0)
        dtype = np.dtype(f"uint{8 * math.ceil(dtype_bytes(task.tensor.dtype))}")  # bits are bits
        size = task.tensor.size * dtype.itemsize
        whole = random.integers(0, 256, size, dtype=np.uint8).view(dtype)
        whole = whole.reshape(task.tensor.shape)

        def cut(placed, side):
            tiles = device_tiles(placed, task.tensor.shape, side)
            return {device: whole[box.within((0,) * whole.ndim)] for device, box in tiles.items()}

        return cut(task.source, "source"), cut(task.target, "target")

    return make


@pytest.fixture
def same_bytes():
    """Return a function that asserts two shard mappings are equal bit for bit."""

    def check(got, expected):
        assert set(got) == set(expected)
        for device, array in expected.items():
            assert got[device].shape == array.shape
            assert got[device].tobytes() == np.ascontiguousarray(array).tobytes()

    return check


@pytest.fixture
def make_world(monkeypatch):
    """Return a function that installs a fake CuPy of a version."""

    def make(seed=0, version="14.2.0"):
        world = World(seed, version)
        for name, module in world.cupy().items():
            monkeypatch.setitem(sys.modules, name, module)
        return world

    return make
