"""The link of last resort: messages through Ray's object store instead of sockets.

For clusters whose nodes may not open connections to each other. A message is one call of the
receiving actor, in its concurrency group "data", with the header and one numpy array, which Ray
puts into shared memory. All bytes travel inside messages; nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class ObjectStoreLink:
    """The end of one worker; `wait` blocks until a call of an actor is done (`ray.get`)."""

    most_inline: int | None = None

    def __init__(self, name: str, wait: Callable[[Any], Any]) -> None:
        self.name, self._wait = name, wait
        self._peers: dict[str, Any] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._sent: Counter[str] = Counter()  # messages to each peer
        self._last: dict[str, int] = {}  # number of the last message from each
        self._closed = False

    @property
    def address(self) -> None:
        """Nothing: others call the actor."""

    def open(self, arrived: Any, lost: Any, supply: Any) -> None:
        """Begin to hand on messages and losses."""
        self._arrived, self._lost = arrived, lost

    def connect(self, peers: Mapping[str, Any]) -> None:
        """Learn the actors of the other workers."""
        self._peers = dict(peers)

    def deliver(self, sender: str, number: int, header: dict[str, Any], payload: Bytes) -> None:
        """Hand on an arrived message, unless it came before: Ray calls again where it lost an
        answer."""
        if number > self._last.get(sender, 0):
            self._last[sender] = number
            self._arrived(sender, header, payload)

    def post(
        self,
        peer: str,
        header: dict[str, Any],
        payload: Bytes | None = None,
        later: bool = False,
    ) -> None:
        """Send a message behind the earlier ones to `peer`; a thread does that at once."""
        if peer not in self._peers:
            raise RuntimeError(f"{self.name} knows no peer {peer!r}")
        if peer not in self._threads:
            self._threads[peer] = ThreadPoolExecutor(max_workers=1)
        if not self._closed:
            self._threads[peer].submit(self._call, peer, header, payload)

    def flush(self) -> None:
        """Do nothing: no message is kept."""

    def lanes(self, peer: str) -> int:
        """Return 1: one thread unpacks what arrives."""
        return 1

    def reads(self, peer: str) -> bool:
        """Return False: nothing is read."""
        return False

    def read(self, peer: str, address: int, runs: Any, region: Any, begin: int, end: int) -> None:
        """Refuse: nothing is read."""
        raise RuntimeError(f"{self.name} cannot read the memory of {peer}")

    def fetch(
        self, peer: str, key: str, number: int, begin: int, views: Sequence[memoryview]
    ) -> None:
        """Refuse: nothing is fetched."""
        raise RuntimeError(f"{self.name} cannot fetch {key} from {peer}")

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, peer: str, header: dict[str, Any], payload: Bytes | None) -> None:
        try:
            deliver = self._peers[peer].deliver.options(concurrency_group="data")
            whole = np.empty(0, np.uint8) if payload is None else payload
            self._sent[peer] += 1
            self._wait(deliver.remote(self.name, self._sent[peer], header, whole))
        except Exception as error:
            if not self._closed:
                self._lost(peer, f"it cannot be called ({error})")
