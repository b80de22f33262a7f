"""What strategies are made of: deliveries in a balanced order, and what carries them out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from attrs import evolve, frozen

from alpa_interchange.reshard import Transfer
from resharding.division import Delivery
from resharding.network import Links
from resharding.order import Job, find_order
from resharding.slices import Box, Slice, by_host


@frozen(kw_only=True)
class Setting:
    """What every strategy needs besides the slices."""

    host_of: dict[int, int]
    links: Links
    element_bytes: float
    device_lanes: bool  # balance over devices instead of hosts
    seed: int
    num_restarts: int
    node_limit: int
    shake: int | None = None  # a random order of this number instead of the best one
    unordered: bool = False  # balanced senders in the order of the slices: to judge a strategy by


@frozen
class Draft:
    """Transfers in issue order, and the makespan (seconds) of the lane model that ordered them."""

    transfers: tuple[Transfer, ...]
    lane_seconds: float


def deliveries_of(slices: Sequence[Slice], setting: Setting) -> list[Delivery]:
    """Return what must move: receivers beside a holder are fed inside their host."""
    host_of, found = setting.host_of, []
    for piece in slices:
        holder_hosts = {host_of[device] for device in piece.holders}
        far: list[int] = []
        for host, inside in by_host(piece.receivers, host_of).items():
            if host in holder_hosts:
                beside = tuple(d for d in piece.holders if host_of[d] == host)
                found.append(Delivery(piece, beside, tuple(inside), remote=False))
            else:
                far += inside
        if far:
            found.append(Delivery(piece, piece.holders, tuple(far), remote=True))
    return found


def in_order(
    deliveries: Sequence[Delivery], setting: Setting, *, scattered: bool = False
) -> tuple[list[tuple[Delivery, int]], float]:
    """Return deliveries in issue order with their senders, and the makespan of the lane model."""
    links = setting.links
    jobs = [
        Job(
            seconds=chain_seconds(delivery, links, scattered) + delivery.gather_seconds,
            senders=delivery.senders,
            receivers=delivery.receivers,
        )
        for delivery in deliveries
    ]
    devices = {d for job in jobs for d in (*job.senders, *job.receivers)}
    order = find_order(
        jobs,
        {device: device for device in devices} if setting.device_lanes else setting.host_of,
        receivers_block=links.network.issue != "none",
        seed=setting.seed,
        num_restarts=setting.num_restarts,
        node_limit=setting.node_limit,
        shake=setting.shake,
        unordered=setting.unordered,
    )
    return [(deliveries[j], sender) for j, sender in order.sequence], order.seconds


def chains(chosen: Sequence[tuple[Delivery, int]], setting: Setting) -> list[Transfer]:
    """Return a copy, or a chunked chain, for each delivery and its sender."""
    transfers, links = [], setting.links
    for delivery, sender in chosen:
        box, receivers = delivery.piece.box, delivery.receivers
        if len(receivers) == 1:
            transfers.append(copy_of(box, sender, receivers[0]))
            continue
        rates = [links.hop_rate(a, b) for a, b in itertools.pairwise((sender, *receivers))]
        transfers.append(
            Transfer(
                method="broadcast",
                start=box.start,
                stop=box.stop,
                sender=sender,
                receivers=receivers,
                num_chunks=links.network.num_chunks(delivery.piece.num_bytes, rates),
            )
        )
    return transfers


def spread(
    delivery: Delivery, sender: int, after: tuple[int, ...], setting: Setting, first: int
) -> list[Transfer]:
    """Return what feeds the receivers from a device that has the bytes; the transfers get numbers
    from `first` on.

    A chain, or what ends earlier for few bytes: copies to each receiver at once where operations do
    not block, a binomial tree of copies where receivers do one at a time side by side.
    """
    receivers, links = delivery.receivers, setting.links
    chain = evolve(delivery, senders=(sender,))
    box, issue = delivery.piece.box, links.network.issue
    one = delivery.piece.num_bytes / links.hop_rate(sender, receivers[0])
    latency, limit = links.network.latency, chain_seconds(chain, links, scattered=False)
    if issue == "none" and latency + len(receivers) * one < limit:
        return [copy_of(box, sender, each, after) for each in receivers]
    lanes = {setting.host_of[each] for each in receivers} if issue == "host" else set(receivers)
    side_by_side = issue != "none" and len(lanes) == len(receivers)
    # as long as the chain is soon enough: each copy occupies two lanes, the chain all of them
    if side_by_side and len(receivers).bit_length() * (latency + one) <= limit * (1 + 1e-9):
        members, brought = (sender, *receivers), {0: after}
        transfers: list[Transfer] = []
        for k in range(1, len(members)):
            feeder = k - (1 << (k.bit_length() - 1))
            brought[k] = (first + len(transfers),)
            transfers.append(copy_of(box, members[feeder], members[k], brought[feeder]))
        return transfers
    return [evolve(made, after=after) for made in chains([(chain, sender)], setting)]


def chain_seconds(delivery: Delivery, links: Links, scattered: bool) -> float:
    """Return what a delivery takes from its first sender, with the network to itself."""
    chain = (delivery.senders[0], *delivery.receivers)
    rates = [links.hop_rate(a, b) for a, b in itertools.pairwise(chain)]
    size, slowest = delivery.piece.num_bytes, min(rates)
    if scattered:
        return size / slowest + links.network.latency
    count = links.network.num_chunks(size, rates)
    fill = (sum(size / rate for rate in rates) - size / slowest) / count
    return size / slowest + fill + links.network.latency * (count + len(rates) - 1)


def local_transfers(slices: Sequence[Slice]) -> list[Transfer]:
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


def copy_of(box: Box, sender: int, receiver: int, after: tuple[int, ...] = ()) -> Transfer:
    """Return the copy of a box from one device to another."""
    return Transfer(
        method="copy",
        start=box.start,
        stop=box.stop,
        sender=sender,
        receivers=(receiver,),
        after=after,
    )


def gather_of(box: Box, ring: tuple[int, ...], after: tuple[int, ...]) -> Transfer:
    """Return the all-gather of a box among devices that each have a part of it."""
    return Transfer(
        method="gather",
        start=box.start,
        stop=box.stop,
        sender=ring[0],
        receivers=ring,
        after=after,
    )
