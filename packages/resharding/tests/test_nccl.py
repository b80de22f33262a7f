"""NCCL needs CUDA devices, and the GPU tests say why they skip.

The code between NCCL and jax is tested without: a stand-in for CuPy keeps "device" arrays in numpy
memory and sends raw pointers through `LoopbackWorld`, which matches and blocks like NCCL.
"""

import ctypes
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import numpy as np
import pytest

from resharding import HostExecutor, LoopbackWorld, Network, plan
from resharding.cases import random_task

if find_spec("jax") is None:
    pytest.skip("needs the extra resharding[jax]", allow_module_level=True)


class DeviceArray(np.ndarray):
    """A numpy array that shows its memory the way CuPy does: `data.ptr`."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class Stream:
    ptr = 0

    def __init__(self, non_blocking=False):
        assert non_blocking

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        return None


@pytest.fixture
def fake_cupy(monkeypatch):
    """Install a `cupy` whose NCCL communicators with one id meet in one loopback world."""
    worlds, grouped = {}, {}

    class NcclCommunicator:
        def __init__(self, size, key, rank):
            world = worlds.setdefault(key, LoopbackWorld(size, timeout=20.0))
            self._inner = world.communicator(rank)

        def _bytes(self, pointer, count, kind):
            assert kind == "uint8"
            return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(pointer))

        def send(self, pointer, count, kind, peer, stream):
            self._issue(self._inner.send, self._bytes(pointer, count, kind), peer)

        def recv(self, pointer, count, kind, peer, stream):
            self._issue(self._inner.receive, self._bytes(pointer, count, kind), peer)

        def _issue(self, operation, buffer, peer):
            import threading

            waiting = grouped.get(threading.get_ident())
            if waiting is None:
                operation(buffer, peer, "single")
            else:
                waiting.append((self._inner, operation, buffer, peer))

    def group_start():
        import threading

        grouped[threading.get_ident()] = []

    def group_end():
        import threading

        issued = grouped.pop(threading.get_ident())
        if issued:
            with issued[0][0].group():
                for _, operation, buffer, peer in issued:
                    operation(buffer, peer, "grouped")

    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.NcclCommunicator, nccl.NcclError, nccl.NCCL_UINT8 = NcclCommunicator, OSError, "uint8"
    nccl.groupStart, nccl.groupEnd = group_start, group_end
    nccl.get_unique_id = lambda: bytes(128)
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.Stream, cuda.Device = nccl, Stream, lambda index: nullcontext()
    cupy = types.ModuleType("cupy")
    cupy.cuda = cuda
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(DeviceArray)
    cupy.ascontiguousarray = lambda array: np.array(array, order="C").view(DeviceArray)
    cupy.from_dlpack = lambda array: np.from_dlpack(array).view(DeviceArray)
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@contextmanager
def threads(count):
    with ThreadPoolExecutor(count) as pool:
        yield pool


@pytest.mark.parametrize("strategy", ["send_recv", "broadcast", "global_all_gather"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool"])
def test_jax_arrays_cross_the_nccl_layer_bit_for_bit(fake_cupy, strategy, dtype):
    import jax
    import jax.numpy as jnp

    from resharding import device_tiles
    from resharding.nccl import NcclCommunicator, NcclExecutor, unique_id

    for seed in (3, 5, 8):
        task = random_task(seed, longest=12)
        shape = task.tensor.shape
        values = np.random.default_rng(seed).integers(0, 2, shape)
        whole = np.asarray(jnp.asarray(values).astype(dtype))
        task = type(task)(
            tensor=type(task.tensor)(shape, dtype), source=task.source, target=task.target
        )
        made = plan(task, Network(least_chunk_bytes=4), strategy)
        tiles = device_tiles(task.source, shape, "source")
        shards = {d: whole[box.within((0,) * whole.ndim)] for d, box in tiles.items()}
        devices = sorted({*task.source.devices, *task.target.devices})
        rank_of = {device: rank for rank, device in enumerate(devices)}
        group = unique_id() + bytes([seed]) + f"{strategy}{dtype}".encode()

        def work(device, made=made, rank_of=rank_of, group=group, shards=shards):
            communicator = NcclCommunicator(group, len(rank_of), rank_of[device], 0)
            shard = jax.device_put(shards[device]) if device in shards else None
            return NcclExecutor(made, device, communicator, rank_of).run(shard, dtype)

        with threads(len(devices)) as pool:
            results = dict(zip(devices, pool.map(work, devices), strict=True))
        for device, expected in HostExecutor(made).run(shards).items():
            got = results[device]
            assert got.dtype == dtype and np.asarray(got).tobytes() == expected.tobytes()


def num_gpus():
    """Return the number of CUDA devices CuPy sees; 0 without CuPy or a driver."""
    if find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs the extra resharding[nccl] (CuPy)")
def test_a_unique_id_is_128_bytes_even_without_a_gpu():
    from resharding.nccl import unique_id

    assert len(unique_id()) == 128


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 2, reason=f"needs 2 CUDA devices and CuPy, found {num_gpus()}")
def test_gpus_get_the_tiles_the_host_executor_gives(make_task, make_shards, same_bytes):
    import jax
    from cupy.cuda import nccl

    from resharding.nccl import NcclCommunicator, NcclExecutor, unique_id

    task = make_task((1000, 24), (1, 1), "R R", (1, 1), "R R", dtype="bfloat16")
    made, (shards, _) = plan(task), make_shards(task)
    group, devices = unique_id(), [0, 100]
    nccl.groupStart()
    communicators = [NcclCommunicator(group, 2, rank, rank) for rank in range(2)]
    nccl.groupEnd()

    def work(rank):
        device = devices[rank]
        shard = jax.device_put(shards[device], jax.devices()[rank]) if device in shards else None
        executor = NcclExecutor(made, device, communicators[rank], {0: 0, 100: 1})
        return executor.run(shard, shards[0].dtype)

    with threads(2) as pool:
        results = list(pool.map(work, range(2)))
    same_bytes({100: np.asarray(results[1])}, HostExecutor(made).run(shards))
