"""The ways to move one tensor: each returns transfers, in issue order, for a list of slices.

D bytes from one host to A receiving hosts with B devices each, t = D / card rate:

    send_recv          a copy to every receiver                                  A B t
    local_all_gather   scatter over the devices of each host, gather inside      A t + gather inside
    global_all_gather  scatter over all receivers, one ring over all             t + t (AB-1)/(AB)
    broadcast          a chain through the hosts in K chunks                     t (1 + (A-1)/K)

A slice a receiving host already holds never crosses the card of that host: it is passed on inside.
Where every slice has one receiver all four are the same copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from alpa_interchange.reshard import Transfer
from resharding.network import Network
from resharding.order import Job, find_order
from resharding.slices import Box, Slice, bounding_hosts, split_box


@frozen(kw_only=True)
class Setting:
    """What every strategy needs besides the slices."""

    host_of: dict[int, int]
    network: Network
    device_lanes: bool  # balance over devices instead of hosts
    seed: int
    num_restarts: int
    node_limit: int
    shake: int | None = None  # a random order of this number instead of the best one


@frozen
class Draft:
    """Transfers in issue order, and the makespan (seconds) of the lane model that ordered them."""

    transfers: tuple[Transfer, ...]
    lane_seconds: float


@frozen
class _Delivery:
    """A slice on its way to `receivers`, all of whom one job feeds; `senders` may send it."""

    piece: Slice
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    remote: bool
    gather_seconds: float = 0.0  # spent on the receivers after the bytes have arrived


def send_recv(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a copy per slice and receiver, with senders and order balanced over the hosts."""
    deliveries = [
        _Delivery(delivery.piece, delivery.senders, (receiver,), delivery.remote)
        for delivery in _deliveries(slices, setting)
        for receiver in delivery.receivers
    ]
    chosen, seconds = _ordered(deliveries, setting)
    copies = [_copy(each.piece.box, sender, each.receivers[0]) for each, sender in chosen]
    return Draft((*_in_place(slices), *copies), seconds)


def broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a chunked chain per slice, with senders and order balanced over the hosts."""
    transfers = _in_place(slices)
    chosen, seconds = _ordered(_deliveries(slices, setting), setting)
    for delivery, sender in chosen:
        box, receivers = delivery.piece.box, delivery.receivers
        if len(receivers) == 1:
            transfers.append(_copy(box, sender, receivers[0]))
            continue
        chain = [setting.host_of[device] for device in (sender, *receivers)]
        hops = tuple(a != b for a, b in zip(chain, chain[1:], strict=False))
        transfers.append(
            Transfer(
                method="broadcast",
                start=box.start,
                stop=box.stop,
                sender=sender,
                receivers=receivers,
                num_chunks=setting.network.num_chunks(delivery.piece.num_bytes, hops),
            )
        )
    return Draft(tuple(transfers), seconds)


def local_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice and receiving host, a scatter over its devices and a gather among them."""
    deliveries = []
    for delivery in _deliveries(slices, setting):
        for host in bounding_hosts(delivery.receivers, setting.host_of):
            inside = tuple(d for d in delivery.receivers if setting.host_of[d] == host)
            share = (len(inside) - 1) / len(inside)
            seconds = delivery.piece.num_bytes * share / setting.network.device_bandwidth
            deliveries.append(
                _Delivery(delivery.piece, delivery.senders, inside, delivery.remote, seconds)
            )
    return _scattered(slices, deliveries, setting)


def global_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice, a scatter over all receivers and one gather among them."""
    deliveries = []
    for delivery in _deliveries(slices, setting):
        receivers = delivery.receivers
        rate = setting.network.hop_bandwidth(len(bounding_hosts(receivers, setting.host_of)) > 1)
        seconds = delivery.piece.num_bytes * (len(receivers) - 1) / len(receivers) / rate
        deliveries.append(
            _Delivery(delivery.piece, delivery.senders, receivers, delivery.remote, seconds)
        )
    return _scattered(slices, deliveries, setting)


Strategy = Callable[[Sequence[Slice], Setting], Draft]

STRATEGIES: dict[str, Strategy] = {
    "broadcast": broadcast,
    "send_recv": send_recv,
    "local_all_gather": local_all_gather,
    "global_all_gather": global_all_gather,
}


def candidates(slices: Sequence[Slice], most_receivers: int = 192) -> tuple[str, ...]:
    """Return the strategies worth comparing: only broadcast where it is the same or far simpler.

    With one receiver per slice all strategies are the same copies; with very many receivers the
    others are floods of small messages.
    """
    count = sum(len(piece.receivers) for piece in slices)
    if count > most_receivers or all(len(piece.receivers) <= 1 for piece in slices):
        return ("broadcast",)
    return tuple(STRATEGIES)


def _deliveries(slices: Sequence[Slice], setting: Setting) -> list[_Delivery]:
    """Return what must move: receivers beside a holder are fed inside their host."""
    host_of, found = setting.host_of, []
    for piece in slices:
        holder_hosts = {host_of[device] for device in piece.holders}
        for host in bounding_hosts(piece.receivers, host_of):
            if host in holder_hosts:
                inside = tuple(d for d in piece.receivers if host_of[d] == host)
                beside = tuple(d for d in piece.holders if host_of[d] == host)
                found.append(_Delivery(piece, beside, inside, remote=False))
        far = tuple(
            device
            for host in bounding_hosts(piece.receivers, host_of)
            if host not in holder_hosts
            for device in piece.receivers
            if host_of[device] == host
        )
        if far:
            found.append(_Delivery(piece, piece.holders, far, remote=True))
    return found


def _ordered(
    deliveries: Sequence[_Delivery], setting: Setting
) -> tuple[list[tuple[_Delivery, int]], float]:
    """Return deliveries in issue order with their senders, and the makespan of the lane model."""
    network = setting.network
    jobs = [
        Job(
            seconds=delivery.piece.num_bytes / network.hop_bandwidth(delivery.remote)
            + delivery.gather_seconds,
            senders=delivery.senders,
            receivers=delivery.receivers,
        )
        for delivery in deliveries
    ]
    devices = {d for job in jobs for d in (*job.senders, *job.receivers)}
    order = find_order(
        jobs,
        {device: device for device in devices} if setting.device_lanes else setting.host_of,
        receivers_block=network.issue != "none",
        seed=setting.seed,
        num_restarts=setting.num_restarts,
        node_limit=setting.node_limit,
        shake=setting.shake,
    )
    return [(deliveries[j], sender) for j, sender in order.sequence], order.seconds


def _scattered(slices: Sequence[Slice], deliveries: Sequence[_Delivery], setting: Setting) -> Draft:
    """Return scatter copies and the gather behind them for each delivery, in balanced order."""
    transfers = _in_place(slices)
    chosen, seconds = _ordered(deliveries, setting)
    for delivery, sender in chosen:
        box, receivers = delivery.piece.box, delivery.receivers
        first = len(transfers)
        for receiver, part in zip(receivers, split_box(box, len(receivers)), strict=False):
            transfers.append(_copy(part, sender, receiver))
        if len(receivers) > 1:
            transfers.append(
                Transfer(
                    method="gather",
                    start=box.start,
                    stop=box.stop,
                    sender=receivers[0],
                    receivers=receivers,
                    after=tuple(range(first, len(transfers))),
                )
            )
    return Draft(tuple(transfers), seconds)


def _in_place(slices: Sequence[Slice]) -> list[Transfer]:
    """Return the local transfers: slices whose receiver is a holder itself."""
    return [
        Transfer(
            method="local",
            start=piece.box.start,
            stop=piece.box.stop,
            sender=device,
            receivers=(device,),
        )
        for piece in slices
        for device in piece.in_place
    ]


def _copy(box: Box, sender: int, receiver: int) -> Transfer:
    return Transfer(
        method="copy", start=box.start, stop=box.stop, sender=sender, receivers=(receiver,)
    )
