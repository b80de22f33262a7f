"""Memory for arriving messages that is used again once nothing refers to it any more.

Touching fresh memory for the first time costs more than the copy from a socket, so large buffers
are kept. A buffer is lent out as a numpy array over a ctypes object; when the array, every view of
it and every jax array that took it over are gone, the object dies and its memory returns to the
pool.
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64  # bytes; jax takes over host memory that is aligned so
_LEAST_POOLED = 1 << 16  # smaller buffers come from the allocator's own caches


class ReceiveMemory:
    """Lends aligned buffers; keeps at most `most_bytes` of idle memory."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self._most, self.idle_bytes = most_bytes, 0  # idle: kept and not lent out
        self._idle: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

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
            memory = _aligned(room)
        lease = (ctypes.c_uint8 * size).from_buffer(memory.data)
        weakref.finalize(lease, self._give_back, memory, room).atexit = False
        return np.frombuffer(memoryview(lease), np.uint8)

    def _give_back(self, memory: Bytes, room: int) -> None:
        with self._lock:
            if self.idle_bytes + room <= self._most:
                self._idle.setdefault(room, []).append(memory)
                self.idle_bytes += room


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]
