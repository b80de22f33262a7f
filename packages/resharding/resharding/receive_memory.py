"""Memory for arriving messages that is used again once nothing refers to it any more.

Touching fresh memory for the first time costs more than the copy from a socket, so large buffers
are kept. A buffer is lent out as a numpy array over a ctypes object; when the array, every view of
it and every jax array that took it over are gone, the object dies and its memory returns to the
pool. Large buffers are anonymous files, which other processes may map and write to.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import weakref

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64  # bytes; jax takes over host memory that is aligned so
_LEAST_POOLED = 1 << 16  # smaller buffers come from the allocator's own caches
LEAST_SHARED = 1 << 20
"""Bytes from which a buffer is a file of its own: copying them takes longer than the messages by
which a sender learns where to write, and there are few such buffers, so few open files."""


@frozen
class Shared:
    """A buffer that others may map: a file of this process, and a number that is never reused."""

    number: int
    file: int
    size: int


class ReceiveMemory:
    """Lends aligned buffers; keeps at most `most_bytes` of idle memory."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self._most, self.idle_bytes = most_bytes, 0  # idle: kept and not lent out
        self._idle: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()
        self._shared: dict[int, Shared] = {}  # by address
        self._numbers = itertools.count()

    def shared(self, buffer: Bytes) -> Shared | None:
        """Return what others need to map a buffer that was lent; None if they cannot."""
        return self._shared.get(buffer.ctypes.data)

    def lend(self, size: int) -> Bytes:
        """Return an uninitialised array of `size` bytes at an aligned address."""
        if size < _LEAST_POOLED:
            return _aligned(size)
        room = 1 << (size - 1).bit_length()
        with self._lock:
            idle = self._idle.get(room)
            memory = idle.pop() if idle else None
            if memory is not None:
                self.idle_bytes -= room
        if memory is None:
            memory = self._new(room)
        lease = (ctypes.c_uint8 * size).from_buffer(memory.data)
        weakref.finalize(lease, self._give_back, memory, room).atexit = False
        return np.frombuffer(memoryview(lease), np.uint8)

    def _new(self, room: int) -> Bytes:
        if room < LEAST_SHARED or sys.platform != "linux":
            return _aligned(room)
        file = os.memfd_create("resharding")
        os.ftruncate(file, room)
        mapped = mmap.mmap(file, room)
        memory = np.frombuffer(mapped, np.uint8)
        address = memory.ctypes.data
        self._shared[address] = Shared(next(self._numbers), file, room)
        weakref.finalize(mapped, self._close, address, file).atexit = False
        return memory

    def _close(self, address: int, file: int) -> None:
        self._shared.pop(address, None)
        os.close(file)

    def _give_back(self, memory: Bytes, room: int) -> None:
        with self._lock:
            if self.idle_bytes + room <= self._most:
                self._idle.setdefault(room, []).append(memory)
                self.idle_bytes += room


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]
