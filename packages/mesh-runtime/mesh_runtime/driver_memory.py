"""Memory of the driver that workers of its machine map, by which their shares of a batch go.

The driver copies a share there once, jax takes it over in the workers without another copy, and it
is used again when all of them have said that they have let it go. Through Ray's object store the 3
MB of a small batch take 4 ms of a step, here 0.5: the store is another process, which is asked for
memory and told of the end, while all workers wait.
"""

from __future__ import annotations

import ctypes
import hmac
import itertools
import mmap
import os
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from mesh_runtime.layout import HostTiles
from mesh_runtime.pieces import Box

_ALIGNMENT = 64  # bytes; jax takes over host memory that is aligned so


@frozen
class Place:
    """A file in memory of a process, by a number that the process gives to no other."""

    process: int
    file: int
    number: int
    size: int


@frozen
class MappedShare:
    """A host's share of an array in a file; `tiles` have box, shape and first byte."""

    place: Place
    shape: tuple[int, ...]
    dtype: Any
    tiles: tuple[tuple[Box, tuple[int, ...], int], ...]
    count: int


@define
class _File:
    place: Place
    memory: NDArray[np.uint8]
    num_takers: int = 0


class DriverMemory:
    """Files of this process, as many as shares were lent at a time; lent again when given back."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._free: dict[int, list[_File]] = {}  # by size
        self._lent: dict[int, _File] = {}  # by number
        self._files: list[int] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._files)

    def probe(self) -> tuple[Place, bytes]:
        """Return a file and what is in it, by which workers find out whether they can map it."""
        token = secrets.token_bytes(32)
        found = self._lend(len(token), 1)
        found.memory[: len(token)] = np.frombuffer(token, np.uint8)
        return found.place, token

    def share(self, given: HostTiles, num_takers: int) -> MappedShare:
        """Copy a share into a file that is lent until as many workers have given it back."""
        starts = [0]
        for _, tile in given.tiles:
            starts.append(starts[-1] + -(-tile.nbytes // _ALIGNMENT) * _ALIGNMENT)
        found, tiles = self._lend(starts[-1], num_takers), []
        for (box, tile), start in zip(given.tiles, starts, strict=False):
            _view(found.memory, start, tile.dtype, tile.shape)[...] = tile
            tiles.append((box, tile.shape, start))
        dtype = given.tiles[0][1].dtype
        return MappedShare(found.place, given.shape, dtype, tuple(tiles), given.count)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Note that a worker has let files go."""
        with self._lock:
            for number in numbers:
                found = self._lent[number]
                found.num_takers -= 1
                if not found.num_takers:
                    self._free.setdefault(found.place.size, []).append(self._lent.pop(number))

    def _lend(self, size: int, num_takers: int) -> _File:
        room = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            found = free.pop() if free else self._new(room)
            found.num_takers = num_takers
            self._lent[found.place.number] = found
        return found

    def _new(self, room: int) -> _File:
        file = os.memfd_create("mesh-runtime")
        self._files.append(file)
        os.ftruncate(file, room)
        place = Place(os.getpid(), file, next(self._numbers), room)
        return _File(place, np.frombuffer(mmap.mmap(file, room), np.uint8))


class MappedMemory:
    """What a worker has mapped of the driver's files."""

    def __init__(self) -> None:
        self._mapped: dict[Place, mmap.mmap] = {}
        self._left: deque[int] = deque()  # numbers of files that nothing here refers to any more

    def reaches(self, place: Place, token: bytes) -> bool:
        """Return whether a file can be mapped here and is the one that has `token` in it."""
        try:
            return hmac.compare_digest(self._map(place)[: len(token)], token)
        except (OSError, ValueError):
            return False

    def tiles(self, share: MappedShare) -> HostTiles:
        """Return a share whose file is let go with the last array that jax makes of it."""
        place = share.place
        lease = (ctypes.c_uint8 * place.size).from_buffer(self._map(place))
        weakref.finalize(lease, self._left.append, place.number).atexit = False
        memory = np.frombuffer(memoryview(lease), np.uint8)
        memory.flags.writeable = False
        tiles = [
            (box, _view(memory, start, share.dtype, shape)) for box, shape, start in share.tiles
        ]
        return HostTiles(share.shape, tiles, share.count)

    def take_left(self) -> tuple[int, ...]:
        """Return the numbers of files let go since the last call."""
        return tuple(self._left.popleft() for _ in range(len(self._left)))

    def _map(self, place: Place) -> mmap.mmap:
        found = self._mapped.get(place)
        if found is None:
            opened = os.open(f"/proc/{place.process}/fd/{place.file}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = self._mapped[place] = mmap.mmap(opened, place.size)
            finally:
                os.close(opened)
        return found


def can_share() -> bool:
    """Return whether this system has files in memory that others find."""
    return sys.platform == "linux"


def _view(
    memory: NDArray[np.uint8], start: int, dtype: Any, shape: tuple[int, ...]
) -> NDArray[Any]:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    found: NDArray[Any] = memory[start : start + size].view(dtype).reshape(shape)
    return found


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
