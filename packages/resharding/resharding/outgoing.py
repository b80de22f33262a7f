"""The sending half of a host transport: what is offered to peers until they have fetched it."""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from attrs import define, field

from resharding.regions import Bytes, Region, buffer_of, region_of
from resharding.routes import Part
from resharding.slices import Box
from resharding.transport import Awaited, Link, Tiles, TransportError

CHUNK_BYTES = 4 << 20
"""What one request fetches over a connection: at 1 GB/s 4 ms, beside which a round trip is little,
and a chain of n hosts is filled in n times that."""
_INLINE_IN_FLIGHT = 4 << 20  # bytes inside offers that a peer has not taken yet: later are fetched
_WRITES_AT_A_TIME = 2  # boxes: two cores use up the bandwidth of memory


@define(eq=False)
class Shared:
    """What both halves of a transport know; `changed` guards it and all else they hold."""

    name: str
    link: Link
    checksum: bool
    changed: threading.Condition = field(factory=threading.Condition)
    gone: dict[str, str] = field(factory=dict)  # peer -> why
    closed: bool = False


@define(eq=False)
class _Published:
    """A box that a peer may fetch, and how much of it is there: chunks, or all (None)."""

    region: Region
    there: set[int] | None = None
    gone: str = ""
    left: int = 0  # bytes that were sent


class HostSending:
    """A send under way; see `resharding.transport.Sending`. `waits_for` has peers by box number."""

    def __init__(self, name: str, key: str, waits_for: dict[int, str]) -> None:
        self.waits_for = waits_for
        self.waiting: dict[int, tuple[str, Region]] = {}  # boxes that others go before
        self.left: set[int] = set()  # boxes that are sent, though perhaps not there yet
        self.go_on: Callable[[], None] = lambda: None  # offers those that may be sent now
        self._name, self._key = name, key
        self._taken = False
        self._moved = 0.0  # when something of it last happened
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def taken(self, timeout: float) -> None:
        """Wait until the tiles are in the transport's hands."""
        self._wait(lambda: self._taken, timeout)

    def result(self, timeout: float) -> None:
        """Wait until all peers have what they need."""
        self._wait(lambda: self._taken and not self.waits_for, timeout)

    def awaited(self) -> Awaited:
        """Return the peers that have yet to fetch what is there."""
        with self._changed:
            if not self._taken:
                return (), 0.0
            return tuple(dict.fromkeys(self.waits_for.values())), time.monotonic() - self._moved

    def note_taken(self) -> None:
        """The tiles are in the transport's hands."""
        with self._changed:
            self._taken, self._moved = True, time.monotonic()
            self._changed.notify_all()

    def note_done(self, numbers: list[int]) -> bool:
        """Boxes were fetched; return whether all were."""
        with self._changed:
            for number in numbers:
                self.waits_for.pop(number, None)
            self._moved = time.monotonic()
            self._changed.notify_all()
            return not self.waits_for

    def may_go(self, before: Iterable[int]) -> bool:
        """Return whether all boxes that go `before` another have left."""
        return not any(k in self.waits_for and k not in self.left for k in before)

    def fail(self, error: Exception, peer: str = "") -> None:
        """End it with an error, if it waits for `peer`."""
        with self._changed:
            if self._error is None and (not peer or peer in self.waits_for.values()):
                self._error = error
                self._changed.notify_all()

    def _wait(self, over: Callable[[], bool], timeout: float) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self._error is not None or over(), timeout)
            if self._error is not None:
                raise self._error
            if not found:
                peers = ", ".join(dict.fromkeys(self.waits_for.values()))
                raise TransportError(
                    f"{self._name} waited {timeout:g} s for {peers} to fetch {self._key}"
                )


class Outgoing:
    """Offers boxes of tiles, and answers what peers fetch of them."""

    def __init__(self, shared: Shared, offered_here: Callable[[dict[str, Any]], None]) -> None:
        self._shared, self._link, self._changed = shared, shared.link, shared.changed
        self._offered_here = offered_here  # what this process has for itself
        self._published: dict[tuple[str, str, int], _Published] = {}  # by key, peer, number
        self._sendings: dict[str, HostSending] = {}
        self._inline: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1)
        self._writers = ThreadPoolExecutor(_WRITES_AT_A_TIME)

    def send(self, key: str, part: Part, width: int, tiles: Tiles, program: str) -> HostSending:
        """Offer what `part` sends, once the tiles are there."""
        name = self._shared.name
        waits_for = {number: peer for number, peer in part.sent.items() if peer != name}
        sending = HostSending(name, key, waits_for)
        with self._changed:
            gone = {peer: self._shared.gone.get(peer) for peer in waits_for.values()}
            lost = next(((peer, why) for peer, why in gone.items() if why), None)
            if self._shared.closed:
                lost = ("others", "it was closed")
            if lost is None:
                self._sendings[key] = sending
        if lost is not None:
            sending.fail(TransportError(f"{name} cannot send {key} to {lost[0]}: {lost[1]}"))
            return sending
        self._thread.submit(self._offer_all, sending, key, part, width, tiles, program)
        return sending

    def offer(
        self, key: str, program: str, peer: str, regions: Mapping[int, Region], ready: bool = True
    ) -> None:
        """Tell a peer what it may fetch; `ready` is False for what is still arriving here."""
        header: dict[str, Any] = {"kind": "offer", "key": key, "program": program}
        header["numbers"] = list(regions)
        if self._shared.checksum and ready:
            header["sums"] = [checksum(region) for region in regions.values()]
        size = sum(region.nbytes for region in regions.values())
        if ready and self._travels_inside(peer, size):
            header["inline"] = True
            parts = [np.ascontiguousarray(one.view).reshape(-1) for one in regions.values()]
            payload = np.concatenate([one.view(np.uint8) for one in parts])
            self._link.post(peer, header, payload)
            return
        here = peer == self._shared.name
        if ready and not here:
            regions = {k: _gathered(region) for k, region in regions.items()}
        with self._changed:
            for k, region in regions.items():
                self._published[key, peer, k] = _Published(region, None if ready else set())
        if here:
            self._offered_here(header)
            return
        header["ready"] = ready
        if ready and self._link.reads(peer):
            header["at"] = [
                [one.memory.ctypes.data, one.runs.first, one.runs.run, one.runs.outer]
                for one in regions.values()
            ]
        self._link.post(peer, header)

    def offers(self, key: str, peer: str, number: int) -> bool:
        """Return whether a peer has been told of a box."""
        return (key, peer, number) in self._published

    def region(self, key: str, number: int) -> Region:
        """Return a box that this process has for itself."""
        with self._changed:
            return self._published[key, self._shared.name, number].region

    def note_chunk(self, key: str, peer: str, number: int, chunk: int) -> None:
        """A chunk of a box that is passed on has arrived."""
        with self._changed:
            found = self._published.get((key, peer, number))
            if found is not None and found.there is not None:
                found.there.add(chunk)
                self._changed.notify_all()

    def withdraw(self, key: str, peer: str, number: int, why: str) -> None:
        """Take back an offer of what will not arrive."""
        found = self._published.pop((key, peer, number), None)
        if found is not None:
            found.gone = why

    def fetched(self, peer: str, key: str, numbers: list[int], inline: int) -> None:
        """A peer has boxes; `inline` of their bytes were in the offer."""
        with self._changed:
            for number in numbers:
                self._published.pop((key, peer, number), None)
            self._inline[peer] = self._inline.get(peer, 0) - inline
            sending = self._sendings.get(key)
            if sending is not None and sending.note_done(numbers):
                del self._sendings[key]
            self._changed.notify_all()
        if sending is not None and sending.waiting:
            sending.go_on()

    def supply(
        self, peer: str, key: str, number: int, begin: int, end: int
    ) -> Iterator[memoryview]:
        """Return bytes that a peer asks for; waits for those that still arrive here."""
        with self._changed:
            found = self._published.get((key, peer, number))
            if found is None:
                raise TransportError(f"{self._shared.name} offers {peer} no box {number} of {key}")
            if not 0 <= begin <= end <= found.region.nbytes:
                raise TransportError(f"box {number} of {key} has no bytes {begin}..{end}")
            chunks = range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
            self._changed.wait_for(
                lambda: (
                    self._shared.closed
                    or found.gone
                    or found.there is None
                    or all(chunk in found.there for chunk in chunks)
                )
            )
            if self._shared.closed or found.gone:
                raise TransportError(found.gone or f"{self._shared.name} was closed")
        return self._sent(found, key, number, begin, end)

    def _sent(
        self, found: _Published, key: str, number: int, begin: int, end: int
    ) -> Iterator[memoryview]:
        """Yield bytes; whoever has sent the last of a box asks for more, and has it noted."""
        yield from found.region.views(begin, end)
        self._note_left(found, key, number, end - begin)

    def _note_left(self, found: _Published, key: str, number: int, amount: int) -> None:
        """Bytes of a box have left: what goes behind it may be offered when all have."""
        with self._changed:
            found.left += amount
            sending = self._sendings.get(key)
            if sending is None or not sending.waiting or found.left < found.region.nbytes:
                return
            sending.left.add(number)
        sending.go_on()

    def write(self, peer: str, header: dict[str, Any]) -> None:
        """Write boxes into tiles of a peer, as it asks; tell it which could not be."""
        self._writers.submit(self._write, peer, header)

    def _write(self, peer: str, header: dict[str, Any]) -> None:
        key, width = header["key"], int(header["width"])
        for number, block, file, size, start, stop, box_start, box_stop in header["places"]:
            answer = {"kind": "written", "key": key, "number": number, "done": True}
            try:
                tile, box = Box(tuple(start), tuple(stop)), Box(tuple(box_start), tuple(box_stop))
                memory = self._link.mapped(peer, int(block), int(file), int(size))
                target = region_of(memory[: tile.size * width], tile, box, width)
                with self._changed:
                    found = self._published[key, peer, number]
                target.view[...] = found.region.view.reshape(box.shape)
            except (OSError, ValueError, KeyError):
                answer["done"] = False  # it fetches the box by another way
            self._link.post(peer, answer)
            if answer["done"]:
                self._note_left(found, key, number, found.region.nbytes)

    def lose(self, peer: str, why: str) -> None:
        """Fail what waits for a peer, or for all (""), that is gone."""
        with self._changed:
            sendings = list(self._sendings.values())
        to = f" cannot send to {peer}: {why}" if peer else f" {why}"
        for sending in sendings:
            sending.fail(TransportError(f"{self._shared.name}{to}"), peer)

    def close(self) -> None:
        """Stop offering."""
        self.lose("", "was closed")
        for pool in (self._thread, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _offer_all(
        self,
        sending: HostSending,
        key: str,
        part: Part,
        width: int,
        tiles: Tiles,
        program: str,
    ) -> None:
        try:
            regions = _regions(part, _memory(part, tiles()), width)
            sending.note_taken()
            with self._changed:
                for number, peer in sending.waits_for.items():
                    large = regions[number].nbytes > (self._link.most_inline or 0)
                    if large and not sending.may_go(part.waits.get(number, ())):
                        sending.waiting[number] = peer, regions[number]
                sending.go_on = functools.partial(self._offer_ready, sending, key, part, program)
            for peer in dict.fromkeys(part.sent.values()):
                numbers = [k for k, to in part.sent.items() if to == peer]
                now = {k: regions[k] for k in numbers if k not in sending.waiting}
                if now:
                    self.offer(key, program, peer, now)
            sending.go_on()
            if sending.waits_for:
                return
        except Exception as error:
            sending.fail(error)
            header = {"kind": "failed", "key": key, "reason": str(error) or type(error).__name__}
            for peer in dict.fromkeys(sending.waits_for.values()):
                self._link.post(peer, header)
        with self._changed:
            self._sendings.pop(key, None)

    def _offer_ready(self, sending: HostSending, key: str, part: Part, program: str) -> None:
        """Offer the boxes whose predecessors have left (`Transfer.after`)."""
        with self._changed:
            ready = [k for k in sending.waiting if sending.may_go(part.waits[k])]
            offered = {number: sending.waiting.pop(number) for number in ready}
        for number, (peer, region) in offered.items():
            self.offer(key, program, peer, {number: region})

    def _travels_inside(self, peer: str, size: int) -> bool:
        """Return whether boxes go inside their offer."""
        if peer == self._shared.name:
            return False
        most = self._link.most_inline
        if most is None:
            return True
        if size > most:
            return False
        with self._changed:
            if self._inline.get(peer, 0) + size > _INLINE_IN_FLIGHT:
                return False
            self._inline[peer] = self._inline.get(peer, 0) + size
        return True


def checksum(region: Region) -> int:
    """Return the CRC32 of a box."""
    found = 0
    for view in region.views(0, region.nbytes):
        found = zlib.crc32(view, found)
    return found


def _memory(part: Part, tiles: Mapping[int, Any]) -> dict[Box, Bytes]:
    """Return the memory of every different source tile."""
    found: dict[Box, Bytes] = {}
    for device, box in part.source.items():
        if box not in found:
            tile = np.asarray(tiles[device], order="C")
            if tile.shape != box.shape and tile.size:
                raise ValueError(
                    f"the tile of device {device} must have the shape {box.shape}, got {tile.shape}"
                )
            found[box] = tile.reshape(-1).view(np.uint8)
    return found


def _regions(part: Part, memory: Mapping[Box, Bytes], width: int) -> dict[int, Region]:
    """Return where this process has the boxes it sends."""
    found = {}
    for number in part.sent:
        box = part.boxes[number]
        tile = next(tile for tile in memory if tile.contains(box))
        found[number] = region_of(memory[tile], tile, box, width)
    return found


def _gathered(region: Region) -> Region:
    """Return a region that can be fetched run by run: itself, or a copy in one run."""
    if not region.scattered:
        return region
    made = np.ascontiguousarray(region.view).reshape(-1).view(np.uint8)
    box = Box((0,) * region.view.ndim, region.view.shape)
    return buffer_of(made, box, region.view.dtype.itemsize)
