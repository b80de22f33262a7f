"""The data plane of last resort: messages through Ray's object store instead of sockets.

For clusters whose nodes may not open connections to each other. A message is one call of the
receiving actor, in its concurrency group "data", with the header and one numpy array, which Ray
puts into shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mesh_runtime.data_plane import Bytes, Content, DataPlaneError, Inbox


class ObjectStorePlane:
    """The endpoint of one worker; `wait` blocks until a call of an actor is done (`ray.get`)."""

    def __init__(self, name: str, wait: Callable[[Any], Any]) -> None:
        self.name, self._wait = name, wait
        self._inbox = Inbox(name)
        self._peers: dict[str, Any] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Learn the actors of the other workers."""
        self._peers = dict(peers)

    def deliver(self, sender: str, header: dict[str, Any], payload: Bytes) -> None:
        """Put an arrived message into the inbox."""
        self._inbox.deliver(sender, header, payload)

    def send(self, peer: str, make: Callable[[], Content]) -> Future[None]:
        """Send the message `make()` returns to `peer`, behind the earlier ones to it."""
        if peer not in self._peers:
            raise DataPlaneError(f"{self.name} knows no peer {peer!r}")
        if peer not in self._threads:
            self._threads[peer] = ThreadPoolExecutor(max_workers=1)
        return self._threads[peer].submit(self._transmit, peer, make)

    def take(self, key: str, sender: str, timeout: float) -> Content:
        """Return the message of `sender` under `key`, waiting for it for at most `timeout` s."""
        return self._inbox.take(key, sender, timeout)

    def close(self) -> None:
        """Stop sending; whoever waits fails."""
        self._inbox.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _transmit(self, peer: str, make: Callable[[], Content]) -> None:
        header, payload = make()
        whole = np.concatenate(payload) if payload else np.empty(0, np.uint8)
        try:
            deliver = self._peers[peer].deliver.options(concurrency_group="data")
            self._wait(deliver.remote(self.name, header, whole))
        except Exception as error:
            raise DataPlaneError(f"{self.name} cannot send to {peer}: {error}") from error
