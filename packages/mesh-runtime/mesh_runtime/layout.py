"""How a value is cut over the devices of a mesh, in plain data that every process understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from mesh_runtime.pieces import Box, box_size, device_boxes

Spec: TypeAlias = tuple[None | str | tuple[str, ...], ...]
Tiles: TypeAlias = list[tuple[Box, NDArray[Any]]]


@frozen
class Layout:
    """A grid of devices with named axes, and the axes that each dim is cut along."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    spec: Spec = ()

    def boxes(self, value_shape: Sequence[int]) -> list[Box]:
        """Return the tile of every device, in row-major order, of a value of that shape."""
        return device_boxes(value_shape, self.spec, self.shape, self.axis_names)

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Return the mesh of `devices` that has this grid."""
        grid = np.array(devices).reshape(self.shape)
        return Mesh(grid, self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape))

    def sharding(self, devices: Sequence[Any] | None = None) -> NamedSharding:
        """Return the sharding over `devices`; without them, over a mesh that has none."""
        partition_spec: Any = PartitionSpec
        if devices is not None:
            return NamedSharding(self.mesh(devices), partition_spec(*self.spec))
        types = (AxisType.Auto,) * len(self.shape)
        mesh = AbstractMesh(self.shape, self.axis_names, axis_types=types)
        return NamedSharding(mesh, partition_spec(*self.spec))


@frozen
class HostTiles:
    """A host's share of an array: the tiles of its devices, each once."""

    shape: tuple[int, ...]
    tiles: Tiles


def plain_spec(spec: PartitionSpec, where: str) -> Spec:
    """Return the entries of a partition spec as plain data; `where` names it in the error."""
    plain: list[None | str | tuple[str, ...]] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"{where} leaves a dim unconstrained: {spec}")
        plain.append(tuple(entry) if isinstance(entry, tuple | list) else entry)
    return tuple(plain)


def host_tiles(array: NDArray[Any], layout: Layout, num_hosts: int) -> list[HostTiles]:
    """Return the share of each host of a mesh, whose devices are numbered host by host."""
    boxes = layout.boxes(array.shape)
    per_host = len(boxes) // num_hosts
    return [
        HostTiles(
            array.shape,
            [
                (box, array[tuple(slice(start, stop) for start, stop in box)])
                for box in dict.fromkeys(boxes[host * per_host : (host + 1) * per_host])
            ],
        )
        for host in range(num_hosts)
    ]


def joined(tiles: Tiles) -> NDArray[Any]:
    """Return the array that `tiles` cut up."""
    first, array = tiles[0]
    shape = tuple(max(box[dim][1] for box, _ in tiles) for dim in range(len(first)))
    if box_size(first) == int(np.prod(shape)):
        return array
    whole = np.empty(shape, array.dtype)
    for box, part in tiles:
        whole[tuple(slice(start, stop) for start, stop in box)] = part
    return whole
