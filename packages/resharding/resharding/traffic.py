"""Which device pairs a transfer moves bytes between, and how many."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alpa_interchange.reshard import Transfer
from resharding.slices import Box


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
    """Return (owner, piece) of what a gather exchanges: the slices its `after` copies brought."""
    return tuple(
        (transfers[k].receivers[0], Box(transfers[k].start, transfers[k].stop))
        for k in transfer.after
        if transfers[k].method == "copy"
    )


def edge_bytes(transfer: Transfer, element_bytes: float) -> float:
    """Return the bytes over each hop: the slice, or (n-1)/n of it in a ring of n."""
    extents = [b - a for a, b in zip(transfer.start, transfer.stop, strict=True)]
    size = math.prod(extents) * element_bytes
    if transfer.method == "gather":
        return size * (len(transfer.receivers) - 1) / len(transfer.receivers)
    return size
