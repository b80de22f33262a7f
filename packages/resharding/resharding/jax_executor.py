"""Resharding of jax arrays inside one process: any layout to any other, on any devices.

Whole tiles that only change device are handed to `jax.device_put`. Other tiles are put together by
the copies of a plan: on host devices from zero-copy views of the source shards, into aligned memory
that jax then uses without copying; on others by programs of the devices (`device_executor`), so
that nothing passes through the memory of the host and nothing waits. No arithmetic touches the
elements, except of unreduced arrays.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import evolve
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding.device_executor import DeviceExecutor
from resharding.host_executor import HostExecutor
from resharding.network import Network
from resharding.planner import plan
from resharding.slices import Box

_ALIGNMENT = 64  # bytes; jax takes over host memory that is aligned so


def reshard(arrays: Any, shardings: Any, *, through: str = "auto") -> Any:
    """Return `arrays` (a jax array or a pytree of them) laid out by `shardings`, equal bit for bit.

    `shardings` is one sharding for all, or a pytree of which each leaf is for all arrays below it;
    a device stands for all of an array on it. Source and target may have different devices, device
    counts, axes and memory kinds; all devices must belong to this process. What is no jax array yet
    is put where it belongs.
    `through` is where tiles are put together: "device" by programs of the devices, without waiting
    for the arrays; "host" in host memory; "auto" takes "host" where all devices are host devices,
    whose memory it is.
    An array that is unreduced over axes of its mesh is summed up there by XLA first, onto a part of
    the sum for each device where a dim can be cut so.
    """
    if through not in ("auto", "device", "host"):
        raise ValueError(f"through must be 'auto', 'device' or 'host', got {through!r}")

    def below(to: Any, part: Any) -> Any:
        sharding = SingleDeviceSharding(to) if isinstance(to, jax.Device) else to
        if not isinstance(sharding, Sharding):
            raise TypeError(
                f"reshard needs a jax sharding or device for each array, got {to!r}; name the "
                "layout with NamedSharding(mesh, PartitionSpec(...))"
            )
        return jax.tree.map(lambda array: _reshard(array, sharding, through), part)

    return jax.tree.map(below, shardings, arrays)


def placed_tensor(sharding: Sharding, rank: int) -> PlacedTensor:
    """Return the layout a jax sharding gives a tensor of `rank` dims; hosts are jax processes."""
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return PlacedTensor(
            spec=ShardingSpec.replicated(rank),
            axis_names=("device",),
            mesh_shape=(1,),
            devices=(device.id,),
            hosts=(device.process_index,),
        )
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"resharding needs a NamedSharding or SingleDeviceSharding, got {sharding!r}; name the "
            "layout with a Mesh and a PartitionSpec"
        )
    if sharding.spec.unreduced:
        raise ValueError(
            f"{sharding.spec} is unreduced over {sorted(sharding.spec.unreduced)}, but a value is "
            "not taken apart into summands; give reshard a layout without them"
        )
    dims: list[tuple[str, ...]] = []
    for entry in sharding.spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"{sharding.spec} leaves a dim unconstrained; give every dim a layout")
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        dims.append(axes)
    dims += [()] * (rank - len(dims))
    mesh = sharding.mesh
    return PlacedTensor(
        spec=ShardingSpec(tuple(dims)),
        axis_names=tuple(str(name) for name in mesh.axis_names),
        mesh_shape=tuple(mesh.shape[name] for name in mesh.axis_names),
        devices=tuple(device.id for device in mesh.devices.flat),
        hosts=tuple(device.process_index for device in mesh.devices.flat),
    )


def _reshard(array: Any, sharding: Sharding, through: str) -> Any:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"reshard moves arrays, got a traced value of type {jax.typeof(array)}; call it "
            "outside jit, grad and vmap, or use jax.device_put there"
        )
    if not isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    if array.sharding == sharding:
        return array
    if isinstance(array.sharding, NamedSharding) and array.sharding.spec.unreduced:
        placed_tensor(sharding, array.ndim)  # before it is summed up for nothing
        array = _sum_to(_reduced(array.sharding, array.shape))(array)
    if any(kind not in (None, usual) for kind, usual in map(_memory, (array.sharding, sharding))):
        inside = jax.device_put(array, _usual(array.sharding))  # where programs reach it
        return jax.device_put(_reshard(inside, _usual(sharding), through), sharding)
    pair = _pair(array.shape, str(array.dtype), array.sharding, sharding)
    shards = {pair.number[shard.device]: shard.data for shard in array.addressable_shards}
    devices = {number: device for device, number in pair.number.items()}
    keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)  # numpy has no form for them
    if through == "device" or keys or (through == "auto" and not pair.on_host):
        moved = pair.device_executor.run(shards, devices)
    else:
        moved = _through_host(pair.host_executor, shards, devices)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, moved)


def _reduced(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the layout of the sum of what `sharding` leaves unreduced, cut over the same devices
    if a dim can be cut evenly."""
    mesh, spec = sharding.mesh, sharding.spec
    summed = tuple(axis for axis in mesh.axis_names if axis in spec.unreduced)
    dims = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in (*spec.partitions, *(None,) * (len(shape) - len(spec.partitions)))
    ]
    for dim, extent in enumerate(shape):
        if extent % math.prod(mesh.shape[axis] for axis in (*dims[dim], *summed)) == 0:
            dims[dim] += summed
            break
    return NamedSharding(mesh, PartitionSpec(*dims))


@functools.lru_cache(maxsize=1024)
def _sum_to(sharding: NamedSharding) -> Any:
    return jax.jit(lambda array: jax.sharding.reshard(array, sharding))


@functools.lru_cache(maxsize=1024)
def _memory(sharding: Sharding) -> tuple[str | None, str]:
    """Return the memory kind of a layout, and the one its devices have unless another is named."""
    device: Any = next(iter(sharding.device_set))
    return sharding.memory_kind, str(device.default_memory().kind)


def _usual(sharding: Sharding) -> Sharding:
    return sharding.with_memory_kind(_memory(sharding)[1])


class _Pair:
    """Two layouts of an array, and what carries it from one to the other."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, source: Sharding, target: Sharding
    ) -> None:
        every: list[Any] = list(source.device_set | target.device_set)
        outside = [device for device in every if device.process_index != jax.process_index()]
        if outside:
            raise ValueError(
                f"reshard works inside one process, but {len(outside)} devices (first: "
                f"{outside[0]}) belong to other processes; use a runtime with a data plane between "
                "processes"
            )
        self.on_host = all(device.platform == "cpu" for device in every)
        platforms = sorted({device.platform for device in every})  # ids are unique on one platform
        self.number = {
            device: device.id * len(platforms) + platforms.index(device.platform)
            for device in every
        }
        task = ReshardingTask(
            tensor=TensorType(shape, dtype),
            source=self._placed(source, len(shape)),
            target=self._placed(target, len(shape)),
        )
        self._plan = plan(task, Network(issue="none"), "broadcast")  # inside a host only who copies

    def _placed(self, sharding: Sharding, rank: int) -> PlacedTensor:
        every: list[Any] = list(sharding.device_set)
        number = {device.id: self.number[device] for device in every}
        placed = placed_tensor(sharding, rank)
        return evolve(placed, devices=tuple(number[device] for device in placed.devices))

    @functools.cached_property
    def host_executor(self) -> HostExecutor:
        return HostExecutor(self._plan)

    @functools.cached_property
    def device_executor(self) -> DeviceExecutor:
        return DeviceExecutor(self._plan)


_pair = functools.lru_cache(maxsize=1024)(_Pair)


def _through_host(
    executor: HostExecutor, shards: dict[int, jax.Array], devices: dict[int, Any]
) -> list[jax.Array]:
    """Return the target tiles put together in host memory."""
    owner_of: dict[Box, int] = {}
    for device, box in executor.source_tiles.items():
        owner_of.setdefault(box, device)
    if all(box in owner_of for box in executor.target_tiles.values()):
        moved = []
        for device, box in executor.target_tiles.items():
            here = executor.source_tiles.get(device) == box
            moved.append(jax.device_put(shards[device if here else owner_of[box]], devices[device]))
        return moved
    views = {device: np.asarray(shard) for device, shard in shards.items()}
    made = executor.run(views, _aligned_empty)
    return [jax.device_put(made[device], devices[device]) for device in made]


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return uninitialised memory that jax can take over without copying."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    aligned: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return aligned
