"""Boxes of tiles as runs of bytes, and copies between them: in this process and from another."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from resharding.slices import Box

Bytes = NDArray[np.uint8]

LEAST_RUN = 4096
"""Bytes below which runs are not moved one by one: a page. Runs of 16 KiB are read out of another
process at the speed of memory, of 512 bytes at a seventh of it."""
_MOST_VECTORS = 1024  # IOV_MAX of Linux
_MOST_AT_ONCE = (
    64 << 20
)  # bytes of one call; a call moves less than 2 GiB and cannot be interrupted


@frozen
class Runs:
    """Where a box lies in the memory of a tile, row-major: `run` bytes at `first` and at every step
    of `outer`: (count, stride in bytes) of the dims that the runs are laid out along."""

    first: int
    run: int
    outer: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return self.run * math.prod(count for count, _ in self.outer)

    def starts(self) -> NDArray[np.int64]:
        """Return where the runs begin."""
        found = np.array([self.first], np.int64)
        for count, stride in self.outer:
            found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return found


@frozen(eq=False)
class Region:
    """A box in the memory of a tile; `view` is it as an array of words."""

    view: NDArray[Any]
    memory: Bytes
    runs: Runs

    @property
    def nbytes(self) -> int:
        return self.runs.nbytes

    @property
    def scattered(self) -> bool:
        """Whether its runs are too short to be moved one by one."""
        return bool(self.runs.outer) and self.runs.run < LEAST_RUN

    def views(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the memory of bytes `begin` to `end` of the box."""
        run, starts, flat = self.runs.run, self.runs.starts(), memoryview(self.memory.data)
        while begin < end:
            number, skipped = divmod(begin, run)
            length = min(run - skipped, end - begin)
            start = int(starts[number]) + skipped
            yield flat[start : start + length]
            begin += length


def region_of(memory: Bytes, tile: Box, box: Box, width: int) -> Region:
    """Return `box` in the memory of `tile`, whose elements have `width` bytes."""
    strides = [width * math.prod(tile.shape[dim + 1 :]) for dim in range(len(tile.shape))]
    first = sum(
        (a - b) * stride for a, b, stride in zip(box.start, tile.start, strides, strict=True)
    )
    run, dim = width, len(box.shape)
    while dim and (dim == len(box.shape) or box.shape[dim] == tile.shape[dim]):
        dim -= 1
        run *= box.shape[dim]
    outer = tuple(
        (count, stride)
        for count, stride in zip(box.shape[:dim], strides[:dim], strict=True)
        if count > 1
    )
    words = memory.view(np.dtype(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"))
    where: Any = (..., *box.within(tile.start))  # a view also of a scalar
    view = words.reshape(tile.shape)[where]
    return Region(view, memory, Runs(first, run, outer))


def buffer_of(memory: Bytes, box: Box, width: int) -> Region:
    """Return `memory` as a region that holds `box` and nothing else."""
    return region_of(memory, box, box, width)


def read(process: int, address: int, source: Runs, target: Region, begin: int, end: int) -> None:
    """Copy bytes `begin` to `end` of a box out of the memory of another process, where its tile is
    at `address`."""
    own, base = target.runs, target.memory.ctypes.data
    if not source.outer and not own.outer and end - begin <= _MOST_AT_ONCE:  # as most boxes are
        size = end - begin
        local = np.array([[base + own.first + begin, size]], np.uint64)
        remote = np.array([[address + source.first + begin, size]], np.uint64)
        _read(process, local, remote, size)
        return
    unit = min(source.run, own.run)
    there, here = source.starts(), own.starts()
    for begins, lengths in _pieces(begin, end, unit):
        local, remote = (np.empty((len(begins), 2), np.uint64) for _ in range(2))
        local[:, 0] = base + here[begins // own.run] + begins % own.run
        remote[:, 0] = address + there[begins // source.run] + begins % source.run
        local[:, 1] = remote[:, 1] = lengths
        _read(process, local, remote, int(lengths.sum()))


def readable(process: int, address: int, expected: bytes) -> bool:
    """Return whether this process can read the memory of another, which has `expected` there."""
    if sys.platform != "linux":
        return False
    got = np.zeros(len(expected), np.uint8)
    size = len(expected)
    try:
        _read(
            process,
            np.array([[got.ctypes.data, size]], np.uint64),
            np.array([[address, size]], np.uint64),
            size,
        )
    except OSError:
        return False
    return got.tobytes() == expected


def _pieces(
    begin: int, end: int, unit: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield begins and lengths, none across a multiple of `unit`, of what one call copies."""
    step = min(unit, _MOST_AT_ONCE)
    inside = np.arange(0, unit, step, dtype=np.int64)
    count = max(1, min(_MOST_VECTORS, _MOST_AT_ONCE // step) // len(inside))
    for first in range(begin // unit, -(-end // unit), count):
        units = np.arange(first, min(first + count, -(-end // unit)), dtype=np.int64) * unit
        begins = (units[:, None] + inside).reshape(-1)
        ends = np.minimum((units[:, None] + np.append(inside[1:], unit)).reshape(-1), end)
        begins = np.maximum(begins, begin)
        there = ends > begins
        begins, lengths = begins[there], (ends - begins)[there]
        if step == unit:
            yield begins, lengths
            continue
        for k in range(len(begins)):
            yield begins[k : k + 1], lengths[k : k + 1]


@functools.cache
def _function() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong) * 2,
        ctypes.c_ulong,
    ]
    found: Callable[..., int] = function
    return found


def _read(process: int, local: NDArray[np.uint64], remote: NDArray[np.uint64], size: int) -> None:
    got = _function()(process, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if got != size:
        number = ctypes.get_errno()
        raise OSError(number, f"read {got} of {size} bytes of process {process}")
