"""Carries out plans with an unreduced source between processes: sums first, then what moves.

The devices of one process that follow each other in a `reduce` chain are a run: a process adds the
tiles of its run to what the run before sends, chunk by chunk, and sends that on. Additions are in
the order of the chain, as in `HostExecutor`. A hop between runs is a plan of its own, one copy
under a key of its own; what is summed up is moved by the rest of the plan under the plan's key, so
the receivers of a value need not know how it was made.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask, Transfer
from alpa_interchange.tensor import ShardingSpec, TensorType, dtype_bytes
from resharding.coverage import check_plan
from resharding.outgoing import CHUNK_BYTES
from resharding.slices import Box, all_tiles, split_box
from resharding.sums import split_plan
from resharding.transport import Awaited, Receiving, Sending, Tiles, TransportError

_PATIENCE = 600.0
"""Seconds that a run waits for the one before it; a peer that goes away is noticed at once."""


@frozen
class _Step:
    """What a process does for one chunk of a chain: `run` adds up `box`."""

    chain: int
    position: int  # of the run in its chain
    chunk: int
    box: Box
    before: int | None  # the last device of the run before
    run: tuple[int, ...]
    behind: int | None  # the first device of the run behind


@frozen
class SumParts:
    """A plan with an unreduced source in two: chains that sum up, and the moves of the sum."""

    chains: tuple[Transfer, ...]
    moves: ReshardingPlan
    source: Mapping[int, Box]  # the tile of which each device holds a summand

    def steps(self, name: str, owner_of: Mapping[int, str]) -> tuple[_Step, ...]:
        """Return what the process `name` does, in an order in which no two processes wait for each
        other: the k-th run of a chain has its chunk c in step k + c, behind step k + c - 1."""
        width = math.ceil(dtype_bytes(self.moves.task.tensor.dtype))
        found = []
        for number, transfer in enumerate(self.chains):
            devices = (transfer.sender, *transfer.receivers)
            runs = [tuple(run) for _, run in itertools.groupby(devices, owner_of.__getitem__)]
            box = Box(transfer.start, transfer.stop)
            count = min(transfer.num_chunks, max(1, box.size * width // CHUNK_BYTES))
            for chunk, part in enumerate(split_box(box, count if len(runs) > 1 else 1)):
                for k, run in enumerate(runs):
                    before = runs[k - 1][-1] if k else None
                    behind = runs[k + 1][0] if k + 1 < len(runs) else None
                    if owner_of[run[0]] == name:
                        found.append(_Step(number, k, chunk, part, before, run, behind))
        return tuple(sorted(found, key=lambda step: (step.position + step.chunk, step.chain)))


def parts_of_sum(plan: ReshardingPlan) -> SumParts:
    """Return the two parts of a plan with an unreduced source; the plan is checked."""
    check_plan(plan)
    chains, moves = split_plan(plan)
    return SumParts(chains, moves, all_tiles(plan.task.source, plan.task.tensor.shape))


class End(Protocol):
    """The transport below: carries out plans that only move."""

    name: str

    def send(self, key: str, plan: ReshardingPlan, tiles: Tiles, program: str = "") -> Sending:
        """Post sends."""
        ...

    def receive(self, key: str, plan: ReshardingPlan, program: str = "") -> Receiving:
        """Post receives."""
        ...


class SumSending:
    """A send of summands under way; see `resharding.transport.Sending`."""

    def __init__(
        self,
        end: End,
        key: str,
        parts: SumParts,
        owner_of: Mapping[int, str],
        tiles: Tiles,
        program: str,
    ) -> None:
        self._end, self._key, self._parts, self._program = end, key, parts, program
        self._steps = parts.steps(end.name, owner_of)
        self._sends = any(owner_of[d] == end.name for d in parts.moves.task.source.devices)
        self._tiles = tiles
        self._hops: list[Sending | None] = []  # of every step that was done
        self._changed = threading.Condition()
        self._taken = self._done = False
        self._error: Exception | None = None
        self._moving: Sending | None = None
        self._receivings = {
            step: end.receive(
                self._hop_key(step, step.position), self._hop(step, step.before), program
            )
            for step in self._steps
            if step.before is not None
        }
        threading.Thread(target=self._run, daemon=True).start()

    def taken(self, timeout: float) -> None:
        """Wait until the tiles are in the transport's hands."""
        self._wait(lambda: self._taken, timeout)

    def result(self, timeout: float) -> None:
        """Wait until all peers have what they need."""
        deadline = time.monotonic() + timeout
        self._wait(lambda: self._done, timeout)
        for sending in (*self._hops, self._moving):
            if sending is not None:
                sending.result(max(0.0, deadline - time.monotonic()))

    def awaited(self) -> Awaited:
        """Return the peers that have yet to fetch the sum."""
        return ((), 0.0) if self._moving is None else self._moving.awaited()

    def _wait(self, over: Callable[[], bool], timeout: float) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self._error is not None or over(), timeout)
        if self._error is not None:
            raise self._error
        if not found:
            raise TransportError(
                f"{self._end.name} waited {timeout:g} s for the summands of {self._key}"
            )

    def _run(self) -> None:
        failure: Exception | None = None
        sums: dict[int, NDArray[Any]] = {}
        try:
            own = {device: np.asarray(tile) for device, tile in self._tiles().items()}
            with self._changed:
                self._taken = True
                self._changed.notify_all()
            sums = self._sums(own)
        except Exception as error:
            failure = error

        def summed() -> dict[int, NDArray[Any]]:
            if failure is not None:
                raise failure
            return sums

        if failure is not None:
            for receiving in self._receivings.values():
                receiving.cancel()
            for step in self._steps[len(self._hops) :]:  # the runs behind are told, by failing
                self._pass_on(step, summed)
        if self._sends:  # also a failure, which the receivers are told so
            self._moving = self._end.send(self._key, self._parts.moves, summed, self._program)
        with self._changed:
            self._done, self._error = True, failure
            self._changed.notify_all()

    def _sums(self, own: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Return the tiles of the sum that lie on devices of this process."""
        task = self._parts.moves.task
        tiles, source = all_tiles(task.source, task.tensor.shape), self._parts.source
        if not self._parts.chains:  # each summand is the whole sum
            return {device: tile for device, tile in own.items() if device in tiles}
        held = {
            device: np.empty(tiles[device].shape, tile.dtype)
            for device, tile in own.items()
            if device in tiles
        }
        for step in self._steps:
            parts = [own[device][step.box.within(source[device].start)] for device in step.run]
            if step.before is not None:
                (came,) = self._receivings[step].result(_PATIENCE).values()
                parts.insert(0, came.view(parts[0].dtype).reshape(step.box.shape))
            total = functools.reduce(np.add, parts)
            last = step.run[-1]
            if step.behind is None:
                held[last][step.box.within(tiles[last].start)] = total
            sent = np.ascontiguousarray(total).reshape(-1).view(np.uint8)
            self._pass_on(step, _given(last, sent))
        return held

    def _pass_on(self, step: _Step, tiles: Tiles) -> None:
        """Send the sum up to a step to the run behind, if there is one."""
        if step.behind is None:
            self._hops.append(None)
            return
        key, plan = self._hop_key(step, step.position + 1), self._hop(step, step.run[-1])
        self._hops.append(self._end.send(key, plan, tiles, self._program))

    def _hop(self, step: _Step, sender: int) -> ReshardingPlan:
        """Return the plan by which a chunk goes from a device to the next run of its chain."""
        receiver = step.run[0] if sender == step.before else step.behind
        assert receiver is not None
        width = math.ceil(dtype_bytes(self._parts.moves.task.tensor.dtype))
        return _hop(step.box.size * width, sender, receiver)

    def _hop_key(self, step: _Step, position: int) -> str:
        return f"{self._key}, chunk {step.chunk} of sum {step.chain} at {position}"


def _given(device: int, array: NDArray[Any]) -> Tiles:
    return lambda: {device: array}


@functools.lru_cache(maxsize=4096)
def _hop(num_bytes: int, sender: int, receiver: int) -> ReshardingPlan:
    """Return the plan to move bytes from one device to another."""
    source, target = (
        PlacedTensor(
            spec=ShardingSpec(((),)),
            axis_names=("x",),
            mesh_shape=(1,),
            devices=(device,),
            hosts=(host,),
        )
        for host, device in enumerate((sender, receiver))
    )
    copy = Transfer(
        method="copy", start=(0,), stop=(num_bytes,), sender=sender, receivers=(receiver,)
    )
    tensor = TensorType((num_bytes,), "uint8")
    return ReshardingPlan(
        task=ReshardingTask(tensor=tensor, source=source, target=target),
        transfers=(copy,),
        strategy="send_recv",
        seconds=0.0,
        lower_bound=0.0,
    )
