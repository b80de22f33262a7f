"""Which host sends which part of an array to which host, when a value goes from mesh to mesh.

Every host of the source mesh computes the same assignment from the two layouts alone, so nothing is
negotiated. A piece is the common part of a source tile and a target tile; it goes once to every
host that needs it, from the holding host that has the least to send so far. Devices of one host
share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Box: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) per dim


def device_boxes(
    shape: Sequence[int],
    spec: Sequence[None | str | Sequence[str]],
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
) -> list[Box]:
    """Return the tile of every device of a mesh, in row-major order, for a layout that divides."""
    sizes = dict(zip(axis_names, mesh_shape, strict=True))
    strides = {name: math.prod(mesh_shape[k + 1 :]) for k, name in enumerate(axis_names)}
    boxes = []
    for position in range(math.prod(mesh_shape)):
        box = []
        for dim, extent in enumerate(shape):
            entry = spec[dim] if dim < len(spec) else None
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            index, count = 0, 1
            for axis in axes:
                index = index * sizes[axis] + position // strides[axis] % sizes[axis]
                count *= sizes[axis]
            if extent % count:
                raise ValueError(
                    f"dim {dim} of a value of shape {tuple(shape)} cannot be cut {count} ways over "
                    f"the mesh axes {axes}; choose a layout that divides it"
                )
            box.append((index * (extent // count), (index + 1) * (extent // count)))
        boxes.append(tuple(box))
    return boxes


def assign_pieces(
    source: Iterable[tuple[int, Box]], target: Iterable[tuple[int, Box]]
) -> dict[tuple[int, int], list[Box]]:
    """Return the pieces each source host sends to each target host, for (host, tile) pairs."""
    holders: dict[Box, list[int]] = {}
    for host, box in source:
        if host not in holders.setdefault(box, []):
            holders[box].append(host)
    load: dict[int, int] = {}
    assigned: dict[tuple[int, int], list[Box]] = {}
    for receiver, needed in dict.fromkeys(target):
        for held, hosts in holders.items():
            common = _intersection(held, needed)
            if common is None:
                continue
            sender = min(hosts, key=lambda host: (load.get(host, 0), host))
            load[sender] = load.get(sender, 0) + box_size(common)
            assigned.setdefault((sender, receiver), []).append(common)
    return assigned


def box_size(box: Box) -> int:
    """Return the number of elements in `box`."""
    return math.prod(stop - start for start, stop in box)


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """Return the box of a jax shard index."""
    return tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))


def within(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the index of `box` in an array that holds the box `origin`."""
    return tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(box, origin, strict=True))


def pack(boxes: Sequence[Box], tiles: Mapping[Box, NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Return the bytes of each box, row-major, taken from the tile that contains it."""
    packed = []
    for box in boxes:
        holder = next(tile for tile in tiles if _contains(tile, box))
        part = np.ascontiguousarray(tiles[holder][within(box, holder)])
        packed.append(part.reshape(-1).view(np.uint8))
    return packed


def unpack(
    payload: NDArray[np.uint8], boxes: Sequence[Box], dtype: Any
) -> list[tuple[Box, NDArray[Any]]]:
    """Return (box, array) for the boxes whose bytes follow each other in `payload`."""
    width = np.dtype(dtype).itemsize
    size = sum(box_size(box) for box in boxes) * width
    if size != len(payload):
        raise ValueError(
            f"a message of {len(payload)} bytes names boxes of {size} bytes of {dtype}"
        )
    offset, found = 0, []
    for box in boxes:
        size = box_size(box) * width
        shape = tuple(stop - start for start, stop in box)
        found.append((box, payload[offset : offset + size].view(dtype).reshape(shape)))
        offset += size
    return found


def assemble(tile: Box, pieces: Iterable[tuple[Box, NDArray[Any]]], dtype: Any) -> NDArray[Any]:
    """Return the array of `tile` put together from pieces; a piece equal to it is not copied."""
    shape = tuple(stop - start for start, stop in tile)
    whole, missing = np.empty(shape, dtype), box_size(tile)
    for box, array in pieces:
        if box == tile:
            return array
        if _contains(tile, box):
            whole[within(box, tile)] = array
            missing -= box_size(box)
    if missing > 0:
        raise ValueError(f"{missing} elements of the tile {tile} did not arrive")
    return whole


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _intersection(first: Box, second: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common
