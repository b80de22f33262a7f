"""The cut grid of a resharding task: which device holds and which device needs each slice.

A slice is the common part of a source tile and a target tile (arXiv 2211.05322, appendix B.2: the
boxes between neighbouring tile borders). All receivers of one slice want the same bytes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping

from attrs import frozen

from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import dtype_bytes


@frozen
class Box:
    """A box of tensor elements: `start[d] <= index[d] < stop[d]` for every dim d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        lengths = self.shape
        return math.prod(lengths) if min(lengths, default=1) > 0 else 0

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box."""
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """Return what is in both, None if nothing is."""
        start, stop = (
            tuple(map(max, self.start, other.start)),
            tuple(map(min, self.stop, other.stop)),
        )
        return None if any(map(operator.ge, start, stop)) else Box(start, stop)

    def joined(self, other: Box) -> Box | None:
        """Return the box of both if `other` begins where this one ends, along one dim; else
        None."""
        apart = [
            dim
            for dim in range(len(self.start))
            if (self.start[dim], self.stop[dim]) != (other.start[dim], other.stop[dim])
        ]
        if len(apart) != 1 or self.stop[apart[0]] != other.start[apart[0]]:
            return None
        return Box(self.start, other.stop)

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the index of this box in an array whose first element is at `origin`."""
        return tuple(
            slice(start - base, stop - base)
            for start, stop, base in zip(self.start, self.stop, origin, strict=True)
        )


def bounding_box(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that all of `boxes` are in."""
    starts, stops = zip(*((box.start, box.stop) for box in boxes), strict=True)
    return Box(
        tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True)))
    )


@frozen(kw_only=True)
class Slice:
    """One unit of communication: `receivers` need `box`, of which every holder has a copy."""

    box: Box
    num_bytes: float
    holders: tuple[int, ...]  # source devices, in mesh order
    receivers: tuple[int, ...]  # target devices that do not hold it, in mesh order
    in_place: tuple[int, ...]  # devices that hold it and need it

    def part(self, box: Box) -> Slice:
        """Return the part of it that is `box`."""
        return Slice(
            box=box,
            num_bytes=self.num_bytes * box.size / self.box.size,
            holders=self.holders,
            receivers=self.receivers,
            in_place=self.in_place,
        )


def device_tiles(placed: PlacedTensor, shape: tuple[int, ...], side: str) -> dict[int, Box]:
    """Return `all_tiles` of a layout of which every device holds the values: not of summands."""
    if placed.spec.partial:
        raise ValueError(
            f"the {side} layout is an unreduced sum over the mesh axes {placed.spec.partial}; "
            "only sources of `plan` and `HostExecutor` may be: what moves bytes does not add, so "
            "reduce the value on its own mesh first"
        )
    return all_tiles(placed, shape)


def all_tiles(placed: PlacedTensor, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the tile of each device; a dim of n elements cut k ways has tiles of ceil(n/k).

    Tiles at the end may be shorter or empty, as in XLA. With a partial spec a device holds a
    summand of its tile.
    """
    sizes = dict(zip(placed.axis_names, placed.mesh_shape, strict=True))
    strides = {
        name: math.prod(placed.mesh_shape[k + 1 :]) for k, name in enumerate(placed.axis_names)
    }
    tiles = {}
    for position, device in enumerate(placed.devices):
        start, stop = [], []
        for extent, axes in zip(shape, placed.spec.dims, strict=True):
            index, count = 0, 1
            for axis in axes:
                index = index * sizes[axis] + position // strides[axis] % sizes[axis]
                count *= sizes[axis]
            length = -(-extent // count)
            start.append(min(extent, index * length))
            stop.append(min(extent, (index + 1) * length))
        tiles[device] = Box(tuple(start), tuple(stop))
    return tiles


def cut_slices(task: ReshardingTask) -> tuple[Slice, ...]:
    """Return the slices of `task` in row-major order; none for a tensor without elements."""
    shape = task.tensor.shape
    if 0 in shape:
        return ()
    source = device_tiles(task.source, shape, "source")
    target = device_tiles(task.target, shape, "target")
    element = dtype_bytes(task.tensor.dtype)
    by_source = _by_tile(source)
    cut = []
    for needed, needers in _by_tile(target).items():
        for held, holders in by_source.items():
            common = held.common(needed)
            if common is None:
                continue
            cut.append(
                Slice(
                    box=common,
                    num_bytes=common.size * element,
                    holders=tuple(holders),
                    receivers=tuple(device for device in needers if device not in holders),
                    in_place=tuple(device for device in needers if device in holders),
                )
            )
    return tuple(sorted(cut, key=lambda piece: piece.box.start))


def summand_groups(placed: PlacedTensor) -> tuple[tuple[int, ...], ...]:
    """Return the devices whose summands add up to a tile, in mesh order; a tile that several groups
    have is there several times."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, device in enumerate(placed.devices):
        place, key = position, []
        for name, size in zip(placed.axis_names[::-1], placed.mesh_shape[::-1], strict=True):
            place, index = divmod(place, size)
            key.append(0 if name in placed.spec.partial else index)
        groups.setdefault(tuple(key), []).append(device)
    return tuple(map(tuple, groups.values()))


def split_box(box: Box, count: int) -> list[Box]:
    """Return `box` cut into at most `count` boxes of nearly equal size along its longest dim.

    A dim shorter than `count` is cut into single indices, each of which is cut further.
    """
    if count <= 1 or box.size <= 1:
        return [box]
    shape = box.shape
    dim = max(range(len(shape)), key=shape.__getitem__)
    extent = shape[dim]
    if extent >= count:
        cuts = [box.start[dim] + extent * k // count for k in range(count + 1)]
        return [_replace(box, dim, a, b) for a, b in itertools.pairwise(cuts)]
    pieces: list[Box] = []
    for k in range(extent):
        share = count * (k + 1) // extent - count * k // extent
        at = box.start[dim] + k
        pieces += split_box(_replace(box, dim, at, at + 1), share)
    return pieces


def bounding_hosts(devices: Iterable[int], host_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return the distinct hosts of `devices` in order of first appearance."""
    return tuple(dict.fromkeys(host_of[device] for device in devices))


def by_host(devices: Iterable[int], host_of: Mapping[int, int]) -> dict[int, list[int]]:
    """Return `devices` by host, in order of first appearance."""
    found: dict[int, list[int]] = {}
    for device in devices:
        found.setdefault(host_of[device], []).append(device)
    return found


def hosts_of(task: ReshardingTask) -> dict[int, int]:
    """Return the host of every device of `task`; refuse a device that sits on two hosts."""
    found: dict[int, int] = {}
    for placed in (task.source, task.target):
        for device, host in zip(placed.devices, placed.hosts, strict=True):
            if found.setdefault(device, host) != host:
                raise ValueError(
                    f"device {device} is on host {found[device]} in the source mesh and on host "
                    f"{host} in the target mesh; a device number must mean one device"
                )
    return found


class Cutter:
    """Cuts a box along its longest dim into consecutive parts of about the asked sizes."""

    def __init__(self, box: Box) -> None:
        self._box, self._share, self._at, self._shape = box, 0.0, 0, box.shape
        self._dim = max(range(len(self._shape)), key=self._shape.__getitem__, default=None)

    def next(self, share: float) -> Box | None:
        """Return the next `share` of the elements; None when that is less than half an index.

        Shares add up to 1; each border is the index nearest to where it should be.
        """
        self._share += share
        if self._dim is None:
            after, extent = round(self._share), 1
        else:
            extent = self._shape[self._dim]
            after = round(min(1.0, self._share) * extent)
        before, self._at = self._at, max(self._at, after)
        if before == self._at:
            return None
        if self._dim is None or (before, after) == (0, extent):
            return self._box
        start = self._box.start[self._dim]
        return _replace(self._box, self._dim, start + before, start + after)


def _by_tile(tiles: dict[int, Box]) -> dict[Box, list[int]]:
    grouped: dict[Box, list[int]] = {}
    for device, box in tiles.items():
        if box.size:
            grouped.setdefault(box, []).append(device)
    return grouped


def _replace(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box(
        (*box.start[:dim], start, *box.start[dim + 1 :]),
        (*box.stop[:dim], stop, *box.stop[dim + 1 :]),
    )
