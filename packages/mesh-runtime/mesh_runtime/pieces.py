"""The tiles into which a layout cuts a value, as boxes of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

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


def box_size(box: Box) -> int:
    """Return the number of elements in `box`."""
    return math.prod(stop - start for start, stop in box)


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """Return the box of a jax shard index."""
    return tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))
