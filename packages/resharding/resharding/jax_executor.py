"""Resharding of jax arrays inside one process: any layout to any other, on host devices.

Whole tiles that only change device are handed to `jax.device_put`; a tile put together from several
is assembled by the plan's copies from zero-copy views of the source shards into aligned memory,
which jax then uses without copying. No arithmetic touches the elements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding.host_executor import HostExecutor
from resharding.network import Network
from resharding.planner import plan
from resharding.slices import Box

_ALIGNMENT = 64  # bytes; jax takes over host memory that is aligned so


def reshard(arrays: Any, shardings: Any) -> Any:
    """Return `arrays` (a jax array or a pytree of them) laid out by `shardings`, equal bit for bit.

    `shardings` is one sharding for all or a pytree of the same structure. Source and target may
    have different devices, device counts and axes; all devices must belong to this process.
    """
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda array: _reshard(array, shardings), arrays)
    return jax.tree.map(_reshard, arrays, shardings)


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
    dims: list[tuple[str, ...]] = []
    for entry in sharding.spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"{sharding.spec} leaves a dim unconstrained; give every dim a layout")
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        dims.append(axes)
    dims += [()] * (rank - len(dims))
    mesh = sharding.mesh
    return PlacedTensor(
        spec=ShardingSpec(tuple(dims), tuple(sorted(sharding.spec.unreduced))),
        axis_names=tuple(str(name) for name in mesh.axis_names),
        mesh_shape=tuple(mesh.shape[name] for name in mesh.axis_names),
        devices=tuple(device.id for device in mesh.devices.flat),
        hosts=tuple(device.process_index for device in mesh.devices.flat),
    )


def _reshard(array: jax.Array, sharding: Sharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    outside = [d for d in (array.sharding.device_set | sharding.device_set) if not _is_local(d)]
    if outside:
        raise ValueError(
            f"reshard works inside one process, but {len(outside)} devices (first: {outside[0]}) "
            "belong to other processes; use a runtime with a data plane between processes"
        )
    executor = _executor(array.shape, str(array.dtype), array.sharding, sharding)
    shards = {shard.device.id: shard.data for shard in array.addressable_shards}
    owner_of: dict[Box, int] = {}
    for device, box in executor.source_tiles.items():
        owner_of.setdefault(box, device)
    local: list[Any] = list(sharding.device_set)
    targets = {device.id: device for device in local}
    if all(box in owner_of for box in executor.target_tiles.values()):
        moved = []
        for device, box in executor.target_tiles.items():
            here = executor.source_tiles.get(device) == box
            moved.append(jax.device_put(shards[device if here else owner_of[box]], targets[device]))
    else:
        views = {device: np.asarray(shard) for device, shard in shards.items()}
        made = executor.run(views, _aligned_empty)
        moved = [jax.device_put(made[device], targets[device]) for device in made]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, moved)


@functools.lru_cache(maxsize=1024)
def _executor(
    shape: tuple[int, ...], dtype: str, source: Sharding, target: Sharding
) -> HostExecutor:
    """Return the executor for a pair of layouts; in one address space only the copies matter."""
    task = ReshardingTask(
        tensor=TensorType(shape, dtype),
        source=placed_tensor(source, len(shape)),
        target=placed_tensor(target, len(shape)),
    )
    return HostExecutor(plan(task, Network(issue="none"), "broadcast"))


def _is_local(device: Any) -> bool:
    return bool(device.process_index == jax.process_index())


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return uninitialised memory that jax can take over without copying."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    aligned: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return aligned
