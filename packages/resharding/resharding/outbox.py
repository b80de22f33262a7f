"""Messages on their way to one peer: sent at once where the connection takes them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from resharding.regions import Bytes

_LATER = 0.05
"""Seconds that a message may wait for another to go with: a receiver thanks for what it fetched,
and mostly has something to send itself soon. Reading a message takes 0.3 ms of the core of a
process that computes, as long as reading a tile of 0.8 MB; nobody waits for thanks but to give
memory back."""


class Outbox:
    """Keeps messages in order; a thread sends what cannot be sent at once.

    `connect` opens the connection when the first message is there, in the thread; `lost` is told
    why no more can be sent. Most messages fill no buffer of the system: waking a thread for each
    would take longer than sending it, of the time of a core that computes.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], lost: Callable[[Exception], None]
    ) -> None:
        self._connect, self._lost = connect, lost
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()  # the first one stays until it was sent
        self._later: list[memoryview] = []
        self._due = 0.0  # when what may wait is sent
        self._opened: socket.socket | None = None
        self._closed = False
        threading.Thread(target=self._send, daemon=True).start()

    def post(self, head: bytes, payload: Bytes | None, later: bool = False) -> None:
        """Send a message, without waiting, behind the earlier ones; one that may go `later` goes in
        front of the next one."""
        with self._changed:
            if later:
                if not self._later:
                    self._due = time.monotonic() + _LATER
                    self._changed.notify()
                self._later.append(memoryview(head))
                return
            parts = [memoryview(b"".join([*self._later, head]))]
            self._later.clear()
            self._put(parts if payload is None else [*parts, payload.data])

    def flush(self) -> None:
        """Send what may go later."""
        with self._changed:
            self._put([memoryview(b"".join(self._later))])
            self._later.clear()

    def _put(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            rest = part if self._waiting else self._unsent(part)
            if len(rest):
                self._waiting.append(rest)
        if self._waiting:
            self._changed.notify()

    def close(self) -> None:
        """Send nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _unsent(self, part: memoryview) -> memoryview:
        """Send as much of a part as can be sent at once; return what is left."""
        if self._opened is None:
            return part
        try:
            sent = self._opened.send(part, socket.MSG_DONTWAIT)
        except OSError:  # the buffer is full, or the thread finds out that the connection ended
            return part
        return part[sent:]

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    left = self._due - time.monotonic() if self._later else None
                    if left is not None and left <= 0:
                        self.flush()
                    else:
                        self._changed.wait(left)
                if self._closed:
                    return
                first = self._waiting[0]
            try:
                if self._opened is None:
                    self._opened = self._connect()
                self._opened.sendall(first)
            except OSError as error:
                self._lost(error)
                return
            with self._changed:
                self._waiting.popleft()
