"""Which device pairs a transfer moves bytes between, and how many."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from alpa_interchange.reshard import ReshardingPlan, Transfer
from resharding.slices import Box, all_tiles


def edges(transfer: Transfer) -> tuple[tuple[int, int], ...]:
    """Return the (sender, receiver) hops of a transfer: a pair, a chain or a ring."""
    if transfer.method == "local":
        return ()
    if transfer.method == "gather":
        ring = transfer.receivers
        if len(ring) < 2:
            return ()
        return tuple((device, ring[(k + 1) % len(ring)]) for k, device in enumerate(ring))
    chain = (transfer.sender, *transfer.receivers)
    return tuple(zip(chain, chain[1:], strict=False))


def gathered_pieces(
    transfers: Sequence[Transfer], transfer: Transfer
) -> tuple[tuple[int, Box], ...]:
    """Return (owner, piece) of what a gather exchanges: the slices its `after` copies brought, and
    all that earlier gathers of `after` gathered on its receivers."""
    pieces: dict[tuple[int, Box], None] = {}
    for k in transfer.after:
        earlier = transfers[k]
        if earlier.method == "copy":
            pieces[earlier.receivers[0], Box(earlier.start, earlier.stop)] = None
        elif earlier.method == "gather":
            found = dict.fromkeys(piece for _, piece in gathered_pieces(transfers, earlier))
            owners = [device for device in earlier.receivers if device in transfer.receivers]
            pieces.update(dict.fromkeys((owner, piece) for owner in owners for piece in found))
    return tuple(pieces)


def boxes_moved(plan: ReshardingPlan) -> Iterator[tuple[Box, ...]]:
    """Yield, for each transfer of a plan, the boxes in which it moves its slice.

    That is the slice itself, unless it came to the sender, or to the receivers of a gather, in
    several boxes: those are passed on as they came, in one message.
    """
    tiles = all_tiles(plan.task.source, plan.task.tensor.shape)
    arrived: dict[int, dict[Box, None]] = {}
    for transfer in plan.transfers:
        box, tile = Box(transfer.start, transfer.stop), tiles.get(transfer.sender)
        came = arrived.get(transfer.sender, {})
        boxes: tuple[Box, ...] = (box,)
        if transfer.method == "gather":
            boxes = tuple(piece for _, piece in gathered_pieces(plan.transfers, transfer))
        elif box not in came and (tile is None or not tile.contains(box)):
            boxes = tuple(piece for piece in came if box.contains(piece))
        for receiver in transfer.receivers:
            arrived.setdefault(receiver, {}).update(dict.fromkeys(boxes))
        yield boxes


def edge_bytes(
    transfer: Transfer, element_bytes: float, transfers: Sequence[Transfer] = ()
) -> float:
    """Return the bytes over each hop: the slice, or in a ring what the device that owns least of it
    takes in, of the pieces that earlier ones of `transfers` brought."""
    size: float = math.prod(map(operator.sub, transfer.stop, transfer.start)) * element_bytes
    if transfer.method != "gather":
        return size
    owned = dict.fromkeys(transfer.receivers, 0.0)
    for owner, piece in gathered_pieces(transfers, transfer):
        owned[owner] += piece.size * element_bytes
    return size - min(owned.values())
