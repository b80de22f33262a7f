"""A plan as steps of hops between devices, the same on every rank.

Hop h of a chain that starts in step s carries chunk c in step s + c + h: both ends of a hop are in
the same step, so a process that has both starts them together, and every rank goes through its
steps in one global order. A transfer starts in the step after those it waits for, and those that
bring its sender what it sends, so transfers that may run side by side are started together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from attrs import frozen

from alpa_interchange.reshard import ReshardingPlan, Transfer
from alpa_interchange.tensor import dtype_bytes
from resharding.slices import Box
from resharding.traffic import boxes_moved, gathered_pieces

LEAST_CHUNK_BYTES = 4 << 20
"""A chunk is a kernel launch on two devices, some 10 us; at 50 GB/s 4 MiB take 80. Plans made for a
network without latency have chunks of 128 KiB: 16,384 for 2 GiB."""


@frozen
class Hop:
    """Bytes `begin` to `end` of `box`, in row-major order, go from device to device."""

    transfer: int
    sender: int
    receiver: int
    box: Box
    begin: int
    end: int


def steps_of(plan: ReshardingPlan) -> tuple[tuple[Hop, ...], ...]:
    """Return the steps of all transfers of `plan`, in its order."""
    width = math.ceil(dtype_bytes(plan.task.tensor.dtype))
    steps: list[list[Hop]] = []
    behind: list[int] = []  # by transfer: the first step after it
    brought: dict[int, list[tuple[Box, int]]] = {}  # by device: what arrives there, before step
    moved = zip(plan.transfers, boxes_moved(plan), strict=True)
    for index, (transfer, boxes) in enumerate(moved):
        box = Box(transfer.start, transfer.stop)
        waits = [behind[earlier] for earlier in transfer.after]
        for device in transfer.receivers if transfer.method == "gather" else (transfer.sender,):
            arrivals = brought.get(device, ())
            waits += [step for piece, step in arrivals if piece.common(box) is not None]
        first = max(waits, default=0)
        made = _ring(plan, index, transfer, width) if transfer.method == "gather" else []
        if transfer.method not in ("gather", "local"):
            made = _side_by_side([_chain(index, transfer, each, width) for each in boxes])
        steps += [[] for _ in range(first + len(made) - len(steps))]
        for number, hops in enumerate(made):
            steps[first + number] += hops
        behind.append(first + len(made))
        for receiver in transfer.receivers:
            brought.setdefault(receiver, []).append((box, behind[-1]))
    return tuple(tuple(step) for step in steps if step)


def _side_by_side(chains: Sequence[Sequence[tuple[Hop, ...]]]) -> list[tuple[Hop, ...]]:
    """Return steps in which all `chains` go on."""
    steps = itertools.zip_longest(*chains, fillvalue=())
    return [tuple(itertools.chain.from_iterable(step)) for step in steps]


def _chain(index: int, transfer: Transfer, box: Box, width: int) -> list[tuple[Hop, ...]]:
    size, chain = box.size * width, (transfer.sender, *transfer.receivers)
    count = max(1, min(transfer.num_chunks, size // LEAST_CHUNK_BYTES))
    cuts = [size * c // count for c in range(count + 1)]
    return [
        tuple(
            Hop(index, chain[h], chain[h + 1], box, cuts[step - h], cuts[step - h + 1])
            for h in range(len(chain) - 1)
            if 0 <= step - h < count
        )
        for step in range(count + len(chain) - 2)
    ]


def _ring(
    plan: ReshardingPlan, index: int, transfer: Transfer, width: int
) -> list[tuple[Hop, ...]]:
    """In step s, position k passes on the pieces of position k - s."""
    ring = transfer.receivers
    pieces: dict[int, list[Box]] = {}
    for owner, piece in gathered_pieces(plan.transfers, transfer):
        pieces.setdefault(owner, []).append(piece)
    return [
        tuple(
            Hop(index, device, ring[(k + 1) % len(ring)], piece, 0, piece.size * width)
            for k, device in enumerate(ring)
            for piece in pieces.get(ring[(k - step) % len(ring)], ())
        )
        for step in range(len(ring) - 1)
    ]
