"""Carries out plans between GPUs of several processes; see `resharding.transport.Transport`.

Every ordered pair of meshes has a communicator and a stream per device of its own, so what goes
forth never waits for what comes back. All devices of a process are given their sends and receives
in one group by the thread that posts them. Nothing waits for a device: a stream waits for the XLA
programs that make what it sends, and XLA programs wait for the event behind what they read. A
thread looks after what is under way; when something takes too long or NCCL reports an error, it
gives up the communicator, so nothing hangs, and the error names the tensor and the peers.

Order. A process posts its sends and receives in the order of its instruction list, which is that of
its XLA programs; all processes of a mesh have the same list. So on every device collectives of XLA
and these transfers are issued in one order, as NCCL demands of communicators that run side by side.
Receives are posted early (when a step begins): with late ones, two meshes could each wait for the
other's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from alpa_interchange.reshard import ReshardingPlan
from resharding.coverage import check_plan
from resharding.device_order import Order, join_order
from resharding.hops import Hop, steps_of
from resharding.nccl_library import NcclRanks, Operation
from resharding.slices import Box, device_tiles
from resharding.transport import Awaited, TransportError

_LOOK = 0.001  # seconds between looks at events while somebody waits for them


@frozen
class Exported:
    """Memory of an array for others than XLA; it stays as long as `keep` is referred to."""

    pointer: int
    nbytes: int
    keep: Any


class DeviceMemory(Protocol):
    """What is asked of the arrays' owner (`resharding.jax_memory.JaxMemory`)."""

    def cuda_index(self, device: int) -> int:
        """Return the number that CUDA gives a device here."""
        ...

    def cut(self, tile: Any, start: tuple[int, ...], boxes: Sequence[Box]) -> Sequence[Any]:
        """Return boxes of a tile that begins at `start`, as arrays in the form they travel in."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """Return an array in the form in which elements of `dtype` travel."""
        ...

    def export(self, array: Any, stream: int) -> Exported:
        """Return an array's memory; `stream` waits until the array is computed."""
        ...

    def adopt(self, array: Any, event: Any) -> Any:
        """Return an array over the memory of `array`; programs that read it wait for `event`."""
        ...

    def join(self, pieces: Sequence[Any], order: Order, dtype: str) -> Any:
        """Return a tile of `dtype` put together from pieces that have travelled."""
        ...


@frozen
class NcclPair:
    """Two meshes, from which and to which values go, and the id of their communicator."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    identity: bytes

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"devices {list(self.source)} -> {list(self.target)}"

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank of every device."""
        return {one: k for k, one in enumerate(sorted({*self.source, *self.target}))}


@define(eq=False)
class _Flight:
    """What was issued under one key, until its events are done."""

    key: str
    ranks: NcclRanks
    deadline: float
    peers: tuple[str, ...]
    issued: bool = False
    marks: list[tuple[tuple[str, ...], Any]] = field(factory=list)  # peers of a transfer, event
    givers: tuple[str, ...] = ()  # peers that send to devices here
    starts: list[Any] = field(factory=list)  # events before the first step of devices here
    started: float = 0.0  # when all of these were seen to be done
    keep: list[Any] = field(factory=list)
    done: bool = False
    error: TransportError | None = None


@define(eq=False)
class _Posted:
    """A key of which one side may still be missing here."""

    plan: ReshardingPlan
    missing: set[str]
    program: str
    tiles: Callable[[], Mapping[int, Any]] | None = None
    flight: _Flight | None = None
    made: dict[int, Any] = field(factory=dict)


class NcclSending:
    """A send under way."""

    def __init__(self, owner: NcclTransport, key: str, posted: _Posted) -> None:
        self._owner, self._key, self._posted = owner, key, posted

    def awaited(self) -> Awaited:
        """Return the peers that have yet to take what is computed, and for how long it has been."""
        return self._owner.awaited(self._posted)

    def taken(self, timeout: float) -> None:
        """Return when the arrays may be given away: their memory is kept from then on."""
        self._owner.wait(self._key, lambda: self._posted.flight is not None, self._posted, timeout)

    def result(self, timeout: float) -> None:
        """Wait until all peers have what they need."""
        self._owner.wait(
            self._key,
            lambda: self._posted.flight is not None and self._posted.flight.done,
            self._posted,
            timeout,
        )


class NcclReceiving:
    """A receive under way."""

    def __init__(self, owner: NcclTransport, key: str, posted: _Posted) -> None:
        self._owner, self._key, self._posted = owner, key, posted

    def result(self, timeout: float) -> Mapping[int, Any]:
        """Return the tile of every target device here; programs that read them wait by events."""
        self._owner.wait(self._key, lambda: self._posted.flight is not None, self._posted, timeout)
        return self._posted.made

    def awaited(self) -> Awaited:
        """Return the peers that have yet to send, and for how long there has been room for it."""
        return self._owner.awaited(self._posted)

    def cancel(self) -> None:
        """Give up the pair of meshes: a receive that NCCL has been given cannot be taken back."""
        self._owner.cancel(self._posted)


class NcclTransport:
    """The end of one process; `devices` are those it has, `timeout` seconds that a transfer may
    take from when it is posted here."""

    def __init__(
        self,
        name: str,
        devices: Sequence[int],
        memory: DeviceMemory,
        *,
        timeout: float = 600.0,
        pause: float = 0.05,
    ) -> None:
        self.name, self._memory, self._timeout = name, memory, timeout
        self._devices = frozenset(devices)
        self._owner_of: Mapping[int, str] = {}
        self._pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[NcclPair, NcclRanks]] = {}
        self._steps: dict[ReshardingPlan, tuple[tuple[Hop, ...], ...]] = {}
        self._posted: dict[str, _Posted] = {}
        self._flights: list[_Flight] = []
        self._order = threading.Lock()  # held while a plan is given to the streams
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._pause = pause
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def connect(self, pairs: Sequence[NcclPair], owner_of: Mapping[int, str]) -> None:
        """Make the communicators of all pairs that have devices here, in the same order everywhere.

        All processes call it at the same time, with the same pairs.
        """
        self._owner_of = dict(owner_of)
        for pair in sorted(pairs, key=lambda each: (each.source, each.target)):
            rank_of = pair.rank_of
            here = {
                rank: self._memory.cuda_index(device)
                for device, rank in rank_of.items()
                if device in self._devices
            }
            if here:
                made = NcclRanks(pair.name, pair.identity, len(rank_of), here)
                self._pairs[pair.source, pair.target] = pair, made
        if not self._watcher.is_alive():
            self._watcher.start()

    def send(
        self,
        key: str,
        plan: ReshardingPlan,
        tiles: Callable[[], Mapping[int, Any]],
        program: str = "",
    ) -> NcclSending:
        """Give the sends of this process's devices to their streams."""
        return NcclSending(self, key, self._post(key, plan, "send", program, tiles))

    def receive(self, key: str, plan: ReshardingPlan, program: str = "") -> NcclReceiving:
        """Give the receives of this process's devices to their streams."""
        return NcclReceiving(self, key, self._post(key, plan, "receive", program))

    def close(self) -> None:
        """Give up all that is under way."""
        self._closed.set()
        with self._changed:
            for flight in self._flights:
                flight.error = flight.error or TransportError(f"{self.name} was closed")
            under_way = dict.fromkeys(flight.ranks for flight in self._flights)
            self._flights.clear()
            self._changed.notify_all()
        for ranks in under_way:
            ranks.abort()

    def wait(self, key: str, over: Callable[[], bool], posted: _Posted, timeout: float) -> None:
        """Wait for a state of what was posted; its failure is raised."""

        def failed() -> TransportError | None:
            return None if posted.flight is None else posted.flight.error

        deadline, found = time.monotonic() + timeout, failed() is not None or over()
        while not found and time.monotonic() <= deadline:
            self.look()  # the end of a step waits for this: not until the thread looks again
            with self._changed:
                found = self._changed.wait_for(lambda: failed() is not None or over(), _LOOK)
        error = failed()
        if error is not None:
            raise error
        if not found:
            raise TransportError(f"{self.name} waited {timeout:g} s for {key}")

    def awaited(self, posted: _Posted) -> Awaited:
        """Return whom what was posted waits for, and the seconds since streams here have come to
        it: NCCL does not tell how far it is."""
        flight = posted.flight
        if flight is None or flight.done or not flight.started:
            return (), 0.0
        waits = dict.fromkeys(
            name for names, event in flight.marks if not event.done for name in names
        )
        return (flight.givers or tuple(waits)), time.monotonic() - flight.started

    def cancel(self, posted: _Posted) -> None:
        """Give up a receive, and with it all that goes the same way."""
        if posted.flight is not None and not posted.flight.done:
            self._fail(posted.flight, f"{self.name} gave up {posted.flight.key}")

    # ------------------------------------------------------------------ posting

    def _post(
        self, key: str, plan: ReshardingPlan, side: str, program: str, tiles: Any = None
    ) -> _Posted:
        """Note one side; give everything to the streams once all sides that are here are posted."""
        if plan.task.source.spec.partial:
            raise ValueError(
                f"{key}: the source is an unreduced sum over {plan.task.source.spec.partial}, and "
                "NCCL moves bytes; sum it up on its own mesh first (jax.sharding.reshard in "
                "the program that makes it), or use a HostTransport"
            )
        with self._order:
            posted = self._posted.get(key)
            if posted is None:
                ends = {"send": plan.task.source, "receive": plan.task.target}
                here = {
                    name
                    for name, placed in ends.items()
                    if not self._devices.isdisjoint(placed.devices)
                }
                posted = self._posted[key] = _Posted(plan, here, program)
            if side not in posted.missing:
                raise ValueError(f"{self.name} has no {side} of {key} to post, or has posted it")
            if posted.program != program:
                raise TransportError(
                    f"{key}: one side is of plan {posted.program}, the other of plan {program}"
                )
            posted.missing.discard(side)
            posted.tiles = tiles or posted.tiles
            if not posted.missing:
                del self._posted[key]
                self._issue(key, posted)
        return posted

    def _issue(self, key: str, posted: _Posted) -> None:
        """Give the streams of the devices here what they do for a plan."""
        plan, task = posted.plan, posted.plan.task
        found = self._pairs.get((task.source.devices, task.target.devices))
        if found is None:
            raise TransportError(
                f"{self.name} has no communicator from devices {task.source.devices} to "
                f"{task.target.devices}; name the pair in connect()"
            )
        pair, ranks = found
        steps, rank_of = self._steps_of(plan), pair.rank_of
        owners = dict.fromkeys(self._owner_of[device] for device in rank_of)
        peers = tuple(name for name in owners if name != self.name)
        flight = _Flight(key, ranks, time.monotonic() + self._timeout, peers)
        with self._changed:  # from now on it cannot hang
            self._flights.append(flight)
        held = self._held(plan, steps, posted.tiles() if posted.tiles is not None else {})
        exported: dict[tuple[int, Box], Exported] = {}
        for hop in (each for step in steps for each in step):
            for device in (hop.sender, hop.receiver):
                if device in self._devices and (device, hop.box) not in exported:
                    stream = ranks.streams[rank_of[device]].ptr
                    array = held[device, hop.box]
                    exported[device, hop.box] = self._memory.export(array, stream)
        flight.keep = [one.keep for one in exported.values()]
        flight.starts = [ranks.event(rank_of[device]) for device in {one for one, _ in exported}]
        try:
            for number, step in enumerate(steps):
                operations = self._operations(step, exported, rank_of)
                if operations:
                    ranks.issue(operations, f"step {number} of {key}")
            self._mark(flight, steps, rank_of)
            posted.made = self._joined(plan, steps, held, ranks, rank_of)
        except TransportError as error:
            self._fail(flight, f"{key} between {self.name} and {', '.join(peers)}: {error}")
        posted.tiles = None  # what is sent is kept by its memory
        with self._changed:
            posted.flight, flight.issued = flight, True
            self._changed.notify_all()

    def _operations(
        self,
        step: Sequence[Hop],
        exported: Mapping[tuple[int, Box], Exported],
        rank_of: Mapping[int, int],
    ) -> list[Operation]:
        made = []
        for hop in step:
            sender, receiver = rank_of[hop.sender], rank_of[hop.receiver]
            for device, rank, peer in (
                (hop.sender, sender, receiver),
                (hop.receiver, receiver, sender),
            ):
                if device in self._devices:
                    pointer = exported[device, hop.box].pointer + hop.begin
                    sends = device == hop.sender
                    made.append(Operation(sends, rank, peer, pointer, hop.end - hop.begin))
        return made

    def _held(
        self, plan: ReshardingPlan, steps: Sequence[Sequence[Hop]], tiles: Mapping[int, Any]
    ) -> dict[tuple[int, Box], Any]:
        """Return what devices here send, and what they receive into, by device and box."""
        shape, dtype = plan.task.tensor.shape, plan.task.tensor.dtype
        source = device_tiles(plan.task.source, shape, "source")
        received = {(hop.receiver, hop.box) for step in steps for hop in step}
        wanted: dict[int, dict[Box, None]] = {}
        for step in steps:
            for hop in step:
                if hop.sender in self._devices and (hop.sender, hop.box) not in received:
                    wanted.setdefault(hop.sender, {})[hop.box] = None
        for transfer in plan.transfers:
            if transfer.method == "local" and transfer.sender in self._devices:
                wanted.setdefault(transfer.sender, {})[Box(transfer.start, transfer.stop)] = None
        held: dict[tuple[int, Box], Any] = {}
        for device, boxes in wanted.items():
            pieces = self._memory.cut(tiles[device], source[device].start, list(boxes))
            held.update(zip(((device, box) for box in boxes), pieces, strict=True))
        for device, box in sorted(received, key=lambda each: (each[0], each[1].start)):
            if device in self._devices:
                held[device, box] = self._memory.empty(box.shape, dtype, device)
        return held

    def _joined(
        self,
        plan: ReshardingPlan,
        steps: Sequence[Sequence[Hop]],
        held: Mapping[tuple[int, Box], Any],
        ranks: NcclRanks,
        rank_of: Mapping[int, int],
    ) -> dict[int, Any]:
        """Return the target tiles here, made of what arrives."""
        dtype = plan.task.tensor.dtype
        received = {(hop.receiver, hop.box) for step in steps for hop in step}
        parts: dict[int, dict[Box, None]] = {}
        for device, box in [(hop.receiver, hop.box) for step in steps for hop in step]:
            parts.setdefault(device, {})[box] = None
        for each in plan.transfers:
            if each.method == "local":
                parts.setdefault(each.sender, {})[Box(each.start, each.stop)] = None
        made = {}
        for device, tile in device_tiles(
            plan.task.target, plan.task.tensor.shape, "target"
        ).items():
            if device not in self._devices:
                continue
            boxes = tuple(parts.get(device, ()))
            if not boxes:  # a tile without elements
                made[device] = self._memory.empty(tile.shape, dtype, device)
                continue
            event = ranks.event(rank_of[device])
            pieces = [
                self._memory.adopt(held[device, box], event)
                if (device, box) in received
                else held[device, box]
                for box in boxes
            ]
            made[device] = self._memory.join(pieces, join_order(tile, boxes), dtype)
        return made

    def _mark(
        self, flight: _Flight, steps: Sequence[Sequence[Hop]], rank_of: Mapping[int, int]
    ) -> None:
        """Note an event behind the last step of every device here, with the peers it waits for."""
        peers: dict[int, dict[str, None]] = {}
        givers: list[str] = []
        for step in steps:
            for hop in step:
                if hop.receiver in self._devices and hop.sender not in self._devices:
                    givers.append(self._owner_of[hop.sender])
                for device, other in ((hop.sender, hop.receiver), (hop.receiver, hop.sender)):
                    if device in self._devices:
                        peers.setdefault(device, {})[self._owner_of[other]] = None
        flight.givers = tuple(dict.fromkeys(givers))
        for device, names in peers.items():
            event = flight.ranks.event(rank_of[device])
            flight.marks.append((tuple(one for one in names if one != self.name), event))

    def _steps_of(self, plan: ReshardingPlan) -> tuple[tuple[Hop, ...], ...]:
        if plan not in self._steps:
            check_plan(plan)
            self._steps[plan] = steps_of(plan)
        return self._steps[plan]

    # ------------------------------------------------------------------ looking after it

    def _watch(self) -> None:
        while not self._closed.wait(self._pause):
            self.look()

    def look(self) -> None:
        """Let go what is done; give up what has failed or takes too long."""
        with self._changed:
            flights = list(self._flights)
        for flight in flights:
            waits = [peers for peers, event in flight.marks if not event.done]
            if flight.issued and not flight.started and all(one.done for one in flight.starts):
                flight.started = time.monotonic()
            if flight.issued and not waits:
                with self._changed:
                    flight.done = True
                    flight.keep.clear()
                    if flight in self._flights:
                        self._flights.remove(flight)
                    self._changed.notify_all()
                continue
            late = dict.fromkeys(name for peers in waits for name in peers) or flight.peers
            names = ", ".join(late)
            try:
                if flight.issued:
                    flight.ranks.check()
            except TransportError as error:
                self._fail(flight, f"{flight.key} between {self.name} and {names}: {error}")
                continue
            if time.monotonic() > flight.deadline:
                self._fail(
                    flight, f"{self.name} waited {self._timeout:g} s for {flight.key} from {names}"
                )

    def _fail(self, first: _Flight, reason: str) -> None:
        """Give up a communicator, and with it all that is under way on it."""
        first.ranks.abort()
        with self._changed:
            for flight in [one for one in self._flights if one.ranks is first.ranks]:
                flight.error = TransportError(reason)
                self._flights.remove(flight)
            self._changed.notify_all()
