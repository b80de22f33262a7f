"""How a value is cut over the devices of a mesh, in plain data that every process understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from attrs import frozen
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from mesh_runtime.pieces import Box, box_of, box_size, device_boxes

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


@frozen(eq=False)
class HostTiles:
    """A host's share of an array: the tiles of its devices, each once.

    Of a value given whole, it is the share of all `count` microbatches: `shape` and the boxes are
    those of one, and a first dim of the tiles counts them.
    """

    shape: tuple[int, ...]
    tiles: Tiles
    count: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all tiles."""
        return sum(tile.nbytes for _, tile in self.tiles)

    def parts(self, name: str) -> dict[str, HostTiles]:
        """Return the share of each microbatch, by name; of what is no whole, itself."""
        if not self.count:
            return {name: self}
        return {
            f"{name}@{k}": HostTiles(self.shape, [(box, tile[k]) for box, tile in self.tiles])
            for k in range(self.count)
        }


def plain_spec(spec: PartitionSpec, where: str) -> Spec:
    """Return the entries of a partition spec as plain data; `where` names it in the error."""
    plain: list[None | str | tuple[str, ...]] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"{where} leaves a dim unconstrained: {spec}")
        plain.append(tuple(entry) if isinstance(entry, tuple | list) else entry)
    return tuple(plain)


def host_tiles(
    array: NDArray[Any], layout: Layout, num_hosts: int, count: int = 0
) -> list[HostTiles]:
    """Return the share of each host of a mesh, whose devices are numbered host by host; of an array
    with a first dim that counts microbatches, by the layout of one, if `count` says how many."""
    shape, before = (array.shape[1:], (slice(None),)) if count else (array.shape, ())
    boxes = layout.boxes(shape)
    per_host = len(boxes) // num_hosts
    return [
        HostTiles(
            shape,
            [
                (box, array[(*before, *(slice(start, stop) for start, stop in box))])
                for box in dict.fromkeys(boxes[host * per_host : (host + 1) * per_host])
            ],
            count,
        )
        for host in range(num_hosts)
    ]


def array_of(
    shape: Sequence[int], sharding: NamedSharding, tiles: Mapping[Box, NDArray[Any]]
) -> jax.Array:
    """Return the array whose tiles on the devices here are given by box. It is one call for all
    devices, and jax takes aligned memory over without a copy: of a 0.8 MB tile it takes 0.1 ms, and
    `device_put` and joining the parts 0.3 ms."""
    made: jax.Array = jax.make_array_from_callback(
        tuple(shape), sharding, lambda index: tiles[box_of(index or (), shape)]
    )
    return made


def whole_of(tiles: Tiles) -> NDArray[Any]:
    """Return the array that `tiles` cut up."""
    first, array = tiles[0]
    shape = tuple(max(box[dim][1] for box, _ in tiles) for dim in range(len(first)))
    if box_size(first) == int(np.prod(shape)):
        return array
    whole = np.empty(shape, array.dtype)
    for box, part in tiles:
        whole[tuple(slice(start, stop) for start, stop in box)] = part
    return whole
