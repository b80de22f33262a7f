"""The receiving half of a host transport: fetches what is offered into the tiles it makes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from attrs import define, field

from resharding import outgoing
from resharding.outgoing import Outgoing, Shared, checksum
from resharding.receive_memory import LEAST_SHARED, ReceiveMemory
from resharding.regions import Bytes, Region, Runs, buffer_of, region_of
from resharding.routes import Part
from resharding.slices import Box
from resharding.transport import Awaited, TransportError

_LEAST_RATE = 10e6
"""Bytes/s of a slow network: where a message has a whole box, nothing is heard of it meanwhile."""
_READ_BYTES = 16 << 20
"""What one thread reads of another process at a time: 4 ms, so two threads end nearly together."""


class HostReceiving:
    """A receive under way; see `resharding.transport.Receiving`.

    `tiles` are made when it is started, `missing` and `passing` have peers by box number: who has
    yet to send it, and who has yet to fetch it from here.
    """

    def __init__(self, owner: Incoming, key: str, program: str, part: Part, width: int) -> None:
        self._owner, self.key, self.program = owner, key, program
        self.part, self.width = part, width
        self.nbytes = width * sum(box.size for box in set(part.target.values()))
        self.tiles: dict[Box, Bytes] | None = None
        self.missing = {number: sender for number, (sender, _) in part.received.items()}
        self.passing = {number: to for number, (_, to) in part.received.items() if to}
        self.waiting: dict[int, Callable[[], None]] = {}  # what fetches a box, once it may
        self._targets: dict[int, Region] = {}
        self.wanted = 0.0  # since when somebody waits for it
        self.error: Exception | None = None

    def blocked(self, number: int) -> bool:
        """Return whether a box waits for others that are still to come."""
        return any(one in self.missing for one in self.part.waits.get(number, ()))

    def result(self, timeout: float) -> Mapping[int, Bytes]:
        """Wait for the tile of every target device of this process, as bytes."""
        return self._owner.finish(self, timeout)

    def awaited(self) -> Awaited:
        """Return the peers that have yet to send or to fetch what is passed on."""
        return self._owner.awaited(self)

    def cancel(self) -> None:
        """Give up."""
        self._owner.drop(self)

    def target(self, number: int) -> Region:
        """Return where a received box belongs."""
        found = self._targets.get(number)
        if found is not None:
            return found
        box = self.part.boxes[number]
        for tile, memory in (self.tiles or {}).items():
            if tile.contains(box):
                self._targets[number] = found = region_of(memory, tile, box, self.width)
                return found
        raise TransportError(f"no tile that is needed contains {box.start}..{box.stop}")


@define(eq=False)
class _Fetch:
    """Boxes of one receive that come from one sender."""

    receiving: HostReceiving
    sender: str
    header: dict[str, Any]
    numbers: list[int] = field(init=False)
    left: set[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.numbers = [int(number) for number in self.header["numbers"]]
        self.left = set(self.numbers)

    @property
    def inline(self) -> int:
        """The bytes that travelled inside the offer."""
        if not self.header.get("inline"):
            return 0
        boxes = self.receiving.part.boxes
        return self.receiving.width * sum(boxes[k].size for k in self.numbers)

    @property
    def complete(self) -> bool:
        """Whether the sender has the boxes already: what is passed on early it has not."""
        return bool(self.header.get("ready"))

    def place(self, number: int) -> Any:
        """Return where the sender has a box in its memory, if it says so."""
        places = self.header.get("at")
        return None if places is None else places[self.numbers.index(number)]

    def checked(self, number: int, region: Region) -> None:
        """Refuse a box whose bytes are not those that were sent."""
        sums = self.header.get("sums")
        if sums is not None and checksum(region) != sums[self.numbers.index(number)]:
            raise ValueError(f"the checksum of box {number} is wrong")


class Incoming:
    """Starts posted receives as far as `window` bytes go, and all that somebody waits for."""

    def __init__(self, shared: Shared, window: int) -> None:
        self._shared, self._link, self._changed = shared, shared.link, shared.changed
        self._name, self._window = shared.name, window
        self._outgoing: Outgoing
        self._memory = ReceiveMemory()
        self._posted: dict[str, HostReceiving] = {}  # in order
        self._moved: dict[str, float] = {}  # when something last came from a peer
        self._offers: dict[str, list[tuple[str, dict[str, Any], Bytes]]] = {}
        self._pullers: dict[str, ThreadPoolExecutor] = {}
        # What peers write into: kept until they say that they have, also if nobody wants it any
        # more or the peer is gone, as it may write still.
        self._written: dict[tuple[str, str, int], _Fetch] = {}

    def pass_on_by(self, outgoing: Outgoing) -> None:
        """Learn how to offer to others what arrives."""
        self._outgoing = outgoing

    def receive(self, key: str, part: Part, width: int, program: str) -> HostReceiving:
        """Post the receives of `part`."""
        receiving = HostReceiving(self, key, program, part, width)
        with self._changed:
            if key in self._posted:
                raise ValueError(f"{self._name} has posted a receive of {key} already")
            self._posted[key] = receiving
        self._advance()
        return receiving

    def finish(self, receiving: HostReceiving, timeout: float) -> Mapping[int, Bytes]:
        """Return what a receive made, once it is complete and passed on."""
        with self._changed:
            receiving.wanted = time.monotonic()
        self._advance()
        with self._changed:
            self._changed.wait_for(lambda: self._over(receiving), timeout)
            error = receiving.error or self._failure(receiving, timeout)
        if error is not None:
            self._end(receiving, error)
            raise error
        self._end(receiving)
        return {
            device: (receiving.tiles or {})[box] for device, box in receiving.part.target.items()
        }

    def awaited(self, receiving: HostReceiving) -> Awaited:
        """Return whom a receive waits for, and for how long nothing has come from them, also of
        other receives, which may go before."""
        with self._changed:
            if not receiving.wanted:
                return (), 0.0
            waits = receiving.missing or receiving.passing
            peers = tuple(dict.fromkeys(waits.values()))
            moved = max([receiving.wanted, *(self._moved.get(peer, 0.0) for peer in peers)])
        quiet = time.monotonic() - moved
        if self._link.most_inline is None:
            quiet = max(0.0, quiet - receiving.nbytes / _LEAST_RATE)
        return peers, quiet

    def drop(self, receiving: HostReceiving) -> None:
        """Forget a receive that nobody wants any more."""
        self._end(receiving, TransportError(f"{self._name} gave up {receiving.key}"))

    def arrived(self, sender: str, header: dict[str, Any], payload: Bytes) -> None:
        """Take in an offer; it waits for its receive to be started."""
        with self._changed:
            self._moved[sender] = time.monotonic()
            receiving = self._posted.get(header["key"])
            if receiving is None or receiving.tiles is None:
                self._offers.setdefault(header["key"], []).append((sender, header, payload))
                return
        self._accept(receiving, sender, header, payload)

    def passed_on(self, key: str, numbers: list[int]) -> None:
        """The next of a chain has fetched boxes."""
        with self._changed:
            receiving = self._posted.get(key)
            if receiving is not None:
                for number in numbers:
                    receiving.passing.pop(number, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching."""
        for pool in self._pullers.values():
            pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ beginning and end

    def _advance(self) -> None:
        """Start receives in the order they were posted, and all that somebody waits for."""
        with self._changed:
            if self._shared.closed:
                return
            held = sum(one.nbytes for one in self._posted.values() if one.tiles is not None)
            started = []
            for one in self._posted.values():
                if one.tiles is not None or one.error is not None:
                    continue
                if not one.wanted and held and held + one.nbytes > self._window:
                    continue
                one.tiles = {
                    box: self._memory.lend(box.size * one.width)
                    for box in dict.fromkeys(one.part.target.values())
                }
                held += one.nbytes
                started.append(one)
            offers = [(one, offer) for one in started for offer in self._offers.pop(one.key, [])]
            for one in started:
                self._pass_on_early(one)
        for one, offer in offers:
            self._accept(one, *offer)

    def _end(self, receiving: HostReceiving, error: Exception | None = None) -> None:
        """Forget a receive, which makes room for others."""
        with self._changed:
            if self._posted.get(receiving.key) is receiving:
                del self._posted[receiving.key]
                self._offers.pop(receiving.key, None)
                if error is not None:
                    receiving.error = error
                    for number, peer in receiving.passing.items():
                        self._outgoing.withdraw(receiving.key, peer, number, str(error))
                self._changed.notify_all()
            last = not self._posted
        if last:
            self._link.flush()  # nothing else is to come, nor perhaps to be sent
        self._advance()

    def _over(self, receiving: HostReceiving) -> bool:
        if self._shared.closed or receiving.error is not None:
            return True
        if receiving.tiles is not None and not receiving.missing and not receiving.passing:
            return True
        waits = {*receiving.missing.values(), *receiving.passing.values()}
        return not waits.isdisjoint(self._shared.gone)

    def _failure(self, receiving: HostReceiving, timeout: float) -> Exception | None:
        """Return why a receive is not complete; None if it is."""
        peers = list(dict.fromkeys([*receiving.missing.values(), *receiving.passing.values()]))
        if not peers and receiving.tiles is not None:
            return None
        key, names = receiving.key, ", ".join(peers)
        if self._shared.closed:
            return TransportError(f"{self._name} was closed while waiting for {names} ({key})")
        for peer in peers:
            if peer in self._shared.gone:
                why = self._shared.gone[peer]
                return TransportError(f"{self._name} waits for {key} from {peer}, but {why}")
        total = len(receiving.part.received)
        came = total - len(receiving.missing)
        what = "nothing came" if not came else f"only {came} of {total} boxes came"
        if not receiving.missing:
            what = "nobody there has fetched what is to be passed on"
        return TransportError(
            f"{self._name} waited {timeout:g} s for {key} from {names} and {what}"
        )

    def _pass_on_early(self, receiving: HostReceiving) -> None:
        """Offer what is to be passed on over connections before it arrives, chunk by chunk."""
        if self._link.most_inline is None:
            return
        early: dict[str, dict[int, Region]] = {}
        for number, peer in receiving.passing.items():
            region = receiving.target(number)
            large = region.nbytes > outgoing.CHUNK_BYTES and not region.scattered
            if large and not self._link.reads(peer):
                early.setdefault(peer, {})[number] = region
        for peer, regions in early.items():
            self._outgoing.offer(receiving.key, receiving.program, peer, regions, ready=False)

    # ------------------------------------------------------------------ fetching

    def _accept(
        self, receiving: HostReceiving, sender: str, header: dict[str, Any], payload: Bytes
    ) -> None:
        """Begin to fetch what is offered."""
        if header["kind"] == "failed":
            self._fail(receiving, f"{sender} failed to send it: {header['reason']}")
            return
        if header["program"] != receiving.program:
            self._fail(
                receiving,
                f"this step is of plan {receiving.program}, but {sender} runs plan "
                f"{header['program']}",
            )
            return
        fetch = _Fetch(receiving, sender, header)
        if any(receiving.missing.get(number) != sender for number in fetch.numbers):
            self._fail(receiving, f"{sender} offers boxes {fetch.numbers}, which it has not")
            return
        if header.get("inline"):
            self._submit(fetch, lambda: self._unpack(fetch, payload), at_once=True)
            return
        asked = []
        with self._changed:
            for number in fetch.numbers:
                if receiving.blocked(number):
                    start = functools.partial(self._start, fetch, [number])
                    receiving.waiting[number] = start
                else:
                    asked.append(number)
        self._start(fetch, asked)

    def _start(self, fetch: _Fetch, numbers: Sequence[int]) -> None:
        """Have boxes written by their sender, or fetched."""
        receiving, sender = fetch.receiving, fetch.sender
        places = {number: self._shared_place(fetch, number) for number in numbers}
        asked = [[number, *place] for number, place in places.items() if place is not None]
        for number, place in places.items():
            if place is None:
                self._fetch(fetch, number)
        if asked:
            with self._changed:
                for number, *_ in asked:
                    self._written[sender, receiving.key, number] = fetch
            header = {"kind": "write", "key": receiving.key, "width": receiving.width}
            self._link.post(sender, {**header, "places": asked})

    def _shared_place(self, fetch: _Fetch, number: int) -> list[Any] | None:
        """Return where a sender of this machine can write a box itself, None if it cannot."""
        receiving, sender = fetch.receiving, fetch.sender
        if sender == self._name or not fetch.complete or not self._link.shares(sender):
            return None
        box = receiving.part.boxes[number]
        if box.size * receiving.width < LEAST_SHARED:
            return None
        for tile, memory in (receiving.tiles or {}).items():
            shared = self._memory.shared(memory) if tile.contains(box) else None
            if shared is not None:
                place = [shared.number, shared.file, shared.size]
                return [*place, tile.start, tile.stop, box.start, box.stop]
        return None

    def written(self, sender: str, header: dict[str, Any]) -> None:
        """A sender has written a box here, or cannot."""
        number = int(header["number"])
        with self._changed:
            fetch = self._written.pop((sender, header["key"], number), None)
        if fetch is None:
            return
        if not header["done"]:
            self._fetch(fetch, number)
            return
        target = fetch.receiving.target(number)
        self._submit(fetch, lambda: self._complete(fetch, number, target))

    def _fetch(self, fetch: _Fetch, number: int) -> None:
        """Have a box fetched: from here, by reading the sender's memory, or chunk by chunk."""
        receiving, sender, place = fetch.receiving, fetch.sender, fetch.place(number)
        region = receiving.target(number)
        if sender == self._name:

            def take() -> None:
                region.view[...] = self._outgoing.region(receiving.key, number).view
                self._complete(fetch, number, region)

            self._submit(fetch, take)
            return
        if region.scattered:
            memory = self._memory.lend(region.nbytes)
            region = buffer_of(memory, receiving.part.boxes[number], receiving.width)
        size, take_part = self._way(fetch, number, region, place)
        near = place is not None and self._link.reads(sender) and region.nbytes < LEAST_SHARED
        begins = range(0, region.nbytes, size)
        left = [len(begins)]

        def take_one(begin: int) -> None:
            take_part(begin, min(region.nbytes, begin + size))
            with self._changed:
                left[0] -= 1
                over = not left[0]
            if over:
                self._complete(fetch, number, region)

        for begin in begins:
            self._submit(fetch, functools.partial(take_one, begin), at_once=near)

    def _way(
        self, fetch: _Fetch, number: int, region: Region, place: Any
    ) -> tuple[int, Callable[[int, int], None]]:
        """Return how many bytes to fetch at a time, and what fetches bytes `begin` to `end`."""
        receiving, sender = fetch.receiving, fetch.sender
        if place is not None and self._link.reads(sender):
            address, first, run, outer = place
            runs = Runs(int(first), int(run), tuple((int(a), int(b)) for a, b in outer))

            def read(begin: int, end: int) -> None:
                if runs.nbytes != region.nbytes:
                    raise ValueError(f"box {number} has {region.nbytes} bytes, not {runs.nbytes}")
                self._link.read(sender, int(address), runs, region, begin, end)

            return _READ_BYTES, read
        size = outgoing.CHUNK_BYTES

        def ask(begin: int, end: int) -> None:
            views = list(region.views(begin, end))
            self._link.fetch(sender, receiving.key, number, begin, views)
            peer = receiving.passing.get(number, "")
            self._outgoing.note_chunk(receiving.key, peer, number, begin // size)

        return size, ask

    def _unpack(self, fetch: _Fetch, payload: Bytes) -> None:
        at, receiving = 0, fetch.receiving
        for number in fetch.numbers:
            region = receiving.target(number)
            inside = np.array(payload[at : at + region.nbytes])  # aligned
            if inside.nbytes != region.nbytes:
                raise ValueError(f"an offer of {len(payload)} bytes is too short for its boxes")
            region.view[...] = buffer_of(inside, receiving.part.boxes[number], receiving.width).view
            at += region.nbytes
            self._complete(fetch, number, region)

    def _complete(self, fetch: _Fetch, number: int, region: Region) -> None:
        """A box is here: check it, put it into its tile, offer it to the next of its chain."""
        receiving = fetch.receiving
        fetch.checked(number, region)
        target = receiving.target(number)
        if region.memory is not target.memory:
            target.view[...] = region.view
        with self._changed:
            if receiving.error is not None:
                return
            receiving.missing.pop(number, None)
            fetch.left.discard(number)
            peer = receiving.passing.get(number)
            offered = peer is not None and self._outgoing.offers(receiving.key, peer, number)
            over = not fetch.left
            ready = [k for k in receiving.waiting if not receiving.blocked(k)]
            starts = [receiving.waiting.pop(k) for k in ready]
            self._changed.notify_all()
        if over:
            self._thank(fetch)
        for start in starts:
            start()
        if peer is not None and not offered:
            self._outgoing.offer(receiving.key, receiving.program, peer, {number: target})

    def _thank(self, fetch: _Fetch) -> None:
        """Tell a sender that its boxes are here."""
        key, numbers = fetch.receiving.key, fetch.numbers
        if fetch.sender == self._name:
            self._outgoing.fetched(self._name, key, numbers, 0)
            return
        header = {"kind": "fetched", "key": key, "numbers": numbers, "inline": fetch.inline}
        self._link.post(fetch.sender, header, later=not fetch.receiving.part.ordered)

    def _submit(self, fetch: _Fetch, action: Callable[[], None], at_once: bool = False) -> None:
        """Have a thread do a part of a fetch; what takes less than waking one is done `at_once`."""
        with self._changed:
            if self._shared.closed:
                return
        if at_once:
            self._guarded(fetch, action)
            return
        with self._changed:
            if fetch.sender not in self._pullers:
                lanes = 1 if fetch.sender == self._name else self._link.lanes(fetch.sender)
                self._pullers[fetch.sender] = ThreadPoolExecutor(lanes)
            self._pullers[fetch.sender].submit(self._guarded, fetch, action)

    def _guarded(self, fetch: _Fetch, action: Callable[[], None]) -> None:
        """Run a part of a fetch unless it is given up; its failure is that of the receive."""
        if fetch.receiving.error is not None or self._shared.closed:
            return
        try:
            action()
            self._moved[fetch.sender] = time.monotonic()
        except Exception as error:
            reason = str(error) or type(error).__name__
            gone = self._shared.gone
            with self._changed:  # of a peer that died, another connection says so
                self._changed.wait_for(lambda: fetch.sender in gone, 0.2)
            if fetch.sender not in gone:
                self._fail(fetch.receiving, f"fetching from {fetch.sender} failed: {reason}")

    def _fail(self, receiving: HostReceiving, reason: str) -> None:
        with self._changed:
            if receiving.error is None:
                receiving.error = TransportError(f"{self._name}, {receiving.key}: {reason}")
                self._changed.notify_all()
