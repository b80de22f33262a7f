"""Which device pairs a transfer moves bytes between, and what that adds up to per network card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alpa_interchange.reshard import Transfer
from resharding.network import Network
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
    size = Box(transfer.start, transfer.stop).size * element_bytes
    if transfer.method == "gather":
        return size * (len(transfer.receivers) - 1) / len(transfer.receivers)
    return size


def card_seconds(
    transfers: Iterable[Transfer],
    element_bytes: float,
    host_of: Mapping[int, int],
    network: Network,
) -> float:
    """Return the time of the busiest network card or device port, were all of them always full."""
    cards: dict[tuple[int, int], float] = {}
    ports: dict[tuple[int, int], float] = {}
    for transfer in transfers:
        amount = edge_bytes(transfer, element_bytes)
        for sender, receiver in edges(transfer):
            for side, device in enumerate((sender, receiver)):
                ports[side, device] = ports.get((side, device), 0.0) + amount
            source, target = host_of[sender], host_of[receiver]
            if source != target:
                for side, host in enumerate((source, target)):
                    cards[side, host] = cards.get((side, host), 0.0) + amount
    return max(
        max(cards.values(), default=0.0) / network.nic_bandwidth,
        max(ports.values(), default=0.0) / network.device_bandwidth,
    )
