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

import itertools
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from alpa_interchange.reshard import Transfer
from resharding import fans
from resharding.division import Delivery, divided
from resharding.network import Links
from resharding.order import Job, find_order
from resharding.slices import Box, Slice, bounding_hosts, split_box


@frozen(kw_only=True)
class Setting:
    """What every strategy needs besides the slices."""

    host_of: dict[int, int]
    links: Links
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


def send_recv(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a copy per slice and receiver, with senders and order balanced over the hosts."""
    deliveries = [
        Delivery(delivery.piece, delivery.senders, (receiver,), delivery.remote)
        for delivery in _deliveries(slices, setting)
        for receiver in delivery.receivers
    ]
    chosen, seconds = _ordered(deliveries, setting)
    copies = [_copy(each.piece.box, sender, each.receivers[0]) for each, sender in chosen]
    return Draft((*_in_place(slices), *copies), seconds)


def broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a chunked chain per slice, with senders and order balanced over the hosts."""
    chosen, seconds = _ordered(_deliveries(slices, setting), setting)
    return Draft((*_in_place(slices), *_chains(chosen, setting)), seconds)


def divided_broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return chains of slices divided over their holders, in the order of an open shop."""
    links = setting.links
    deliveries = [part for each in _deliveries(slices, setting) for part in _by_entry(each, links)]

    def lanes_of(delivery: Delivery, sender: int) -> frozenset[int]:
        return _lanes((sender, *delivery.receivers), links)

    def seconds_of(delivery: Delivery, sender: int) -> float:
        chain = (sender, *delivery.receivers)
        slowest = min(links.hop_rate(a, b) for a, b in itertools.pairwise(chain))
        return delivery.piece.num_bytes / slowest

    chosen = divided(deliveries, lanes_of, seconds_of)
    return Draft((*_in_place(slices), *_chains(chosen, setting)), 0.0)


def paced(draft: Draft, links: Links) -> Draft:
    """Return a draft whose transfers wait for those before them on the same cards.

    Streams of several devices share a card fairly, which may stretch the transfer that the busiest
    card is waiting for. Every wait is between transfers of one host.
    """
    last: dict[int, int] = {}
    transfers = []
    for index, transfer in enumerate(draft.transfers):
        if transfer.method not in ("local", "gather"):
            lanes = _lanes((transfer.sender, *transfer.receivers), links)
            before = {last[lane] for lane in lanes if lane in last}
            last.update(dict.fromkeys(lanes, index))
            transfer = evolve(transfer, after=tuple(sorted(before | set(transfer.after))))
        transfers.append(transfer)
    return Draft(tuple(transfers), draft.lane_seconds)


def _lanes(chain: Sequence[int], links: Links) -> frozenset[int]:
    """Return what only one operation through `chain` can use: hosts that block, or cards."""
    if links.network.issue == "host":
        return frozenset(links.host_of[device] for device in chain)
    return frozenset(
        port
        for a, b in itertools.pairwise(chain)
        if links.host_of[a] != links.host_of[b]
        for port in (links.cards_out[a], links.cards_in[b])
    )


def _by_entry(delivery: Delivery, links: Links) -> list[Delivery]:
    """Return parts of a delivery, one for each card through which it may enter its hosts."""
    count = max(links.num_cards[links.host_of[device]] for device in delivery.receivers)
    count = min(count, len(delivery.receivers)) if delivery.remote else 1
    if count <= 1:
        return [delivery]
    parts = []
    for k, box in enumerate(split_box(delivery.piece.box, count)):
        receivers: list[int] = []
        for host in bounding_hosts(delivery.receivers, links.host_of):
            inside = [d for d in delivery.receivers if links.host_of[d] == host]
            first = k * len(inside) // count
            receivers += [*inside[first:], *inside[:first]]
        parts.append(evolve(delivery.part(box), receivers=tuple(receivers)))
    return parts


def _chains(chosen: Sequence[tuple[Delivery, int]], setting: Setting) -> list[Transfer]:
    """Return a copy, or a chunked chain, for each delivery and its sender."""
    transfers, links = [], setting.links
    for delivery, sender in chosen:
        box, receivers = delivery.piece.box, delivery.receivers
        if len(receivers) == 1:
            transfers.append(_copy(box, sender, receivers[0]))
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


def two_level_broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice, a chain through one device of each host and what feeds the others there.

    A chain through A hosts of B devices takes A + B latencies in place of A B. Inside a host, where
    operations do not block, copies to every device take one, and a tree log2(B + 1).
    """
    transfers = _in_place(slices)
    chosen, _ = _ordered(_deliveries(slices, setting), setting)
    for number, (delivery, sender) in enumerate(chosen):
        if not delivery.remote:
            transfers += _inside(delivery, sender, (), setting, len(transfers))
            continue
        hosts = bounding_hosts(delivery.receivers, setting.host_of)
        groups = [
            tuple(d for d in delivery.receivers if setting.host_of[d] == host) for host in hosts
        ]
        turns = [number % len(devices) for devices in groups]  # slices enter by different devices
        groups = [
            (*devices[turn:], *devices[:turn]) for devices, turn in zip(groups, turns, strict=True)
        ]
        first = len(transfers)
        entries = tuple(devices[0] for devices in groups)
        transfers += _chains([(evolve(delivery, receivers=entries), sender)], setting)
        for devices in groups:
            if len(devices) > 1:
                fed = evolve(delivery, receivers=devices[1:])
                transfers += _inside(fed, devices[0], (first,), setting, len(transfers))
    return Draft(tuple(transfers), 0.0)


def _inside(
    delivery: Delivery, sender: int, after: tuple[int, ...], setting: Setting, first: int
) -> list[Transfer]:
    """Return what feeds the receivers of one host; the transfers get numbers from `first` on.

    A chain, or what ends earlier for few bytes: copies to each receiver at once where operations do
    not block, a binomial tree of copies where devices do one at a time.
    """
    receivers, links = delivery.receivers, setting.links
    chain = evolve(delivery, senders=(sender,))
    box, issue = delivery.piece.box, links.network.issue
    one = delivery.piece.num_bytes / links.hop_rate(sender, receivers[0])
    latency, limit = links.network.latency, _chain_seconds(chain, links, scattered=False)
    if issue == "none" and latency + len(receivers) * one < limit:
        return [evolve(_copy(box, sender, each), after=after) for each in receivers]
    if issue == "device" and len(receivers).bit_length() * (latency + one) < limit:
        members, brought = (sender, *receivers), {0: after}
        transfers: list[Transfer] = []
        for k in range(1, len(members)):
            feeder = k - (1 << (k.bit_length() - 1))
            brought[k] = (first + len(transfers),)
            copy = _copy(box, members[feeder], members[k])
            transfers.append(evolve(copy, after=brought[feeder]))
        return transfers
    return [evolve(made, after=after) for made in _chains([(chain, sender)], setting)]


def tile_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a copy per slice to one of its receivers, and one gather per target tile.

    m slices of a tile that n devices want take m + n - 1 latencies in place of m n, and its bytes
    pass the cards twice: for small tensors. Slices of a tile that some of its devices hold already
    go through chains.
    """
    by_tile: dict[tuple[int, ...], list[Slice]] = {}
    chained = []
    for piece in slices:
        needing = {*piece.receivers, *piece.in_place}
        if piece.in_place or len(needing) < 2:
            chained.append(piece)
        else:
            by_tile.setdefault(piece.receivers, []).append(piece)
    held = {device for piece in slices for device in piece.in_place}
    for receivers in [key for key in by_tile if not held.isdisjoint(key)]:
        chained += by_tile.pop(receivers)
    deliveries = _deliveries(chained, setting)
    for receivers, pieces in by_tile.items():
        for k, piece in enumerate(pieces):
            owner = receivers[k * len(receivers) // len(pieces)]
            beside = tuple(d for d in piece.holders if setting.host_of[d] == setting.host_of[owner])
            deliveries.append(Delivery(piece, beside or piece.holders, (owner,), not beside))
    chosen, _ = _ordered(deliveries, setting)
    transfers = [*_in_place(slices), *_chains(chosen, setting)]
    arrived: dict[Box, int] = {Box(t.start, t.stop): k for k, t in enumerate(transfers)}
    for receivers, pieces in by_tile.items():
        transfers.append(
            Transfer(
                method="gather",
                start=tuple(map(min, zip(*(piece.box.start for piece in pieces), strict=True))),
                stop=tuple(map(max, zip(*(piece.box.stop for piece in pieces), strict=True))),
                sender=receivers[0],
                receivers=receivers,
                after=tuple(sorted(arrived[piece.box] for piece in pieces)),
            )
        )
    return Draft(tuple(transfers), 0.0)


def local_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice and receiving host, a scatter over its devices and a gather among them."""
    deliveries = []
    for delivery in _deliveries(slices, setting):
        for host in bounding_hosts(delivery.receivers, setting.host_of):
            inside = tuple(d for d in delivery.receivers if setting.host_of[d] == host)
            share = (len(inside) - 1) / len(inside)
            rate = min(setting.links.device_rate[device] for device in inside)
            seconds = delivery.piece.num_bytes * share / rate
            deliveries.append(
                Delivery(delivery.piece, delivery.senders, inside, delivery.remote, seconds)
            )
    return _scattered(slices, deliveries, setting)


def global_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice, a scatter over all receivers and one gather among them."""
    deliveries = []
    for delivery in _deliveries(slices, setting):
        receivers = delivery.receivers
        ring = zip(receivers, (*receivers[1:], receivers[0]), strict=True)
        rate = min(setting.links.hop_rate(a, b) for a, b in ring)
        seconds = delivery.piece.num_bytes * (len(receivers) - 1) / len(receivers) / rate
        deliveries.append(
            Delivery(delivery.piece, delivery.senders, receivers, delivery.remote, seconds)
        )
    return _scattered(slices, deliveries, setting)


def fan(
    feed: Callable[[Sequence[Delivery], Links], list[Transfer]],
) -> Callable[[Sequence[Slice], Setting], Draft]:
    """Return the strategy that feeds deliveries by one of `resharding.fans`."""

    def strategy(slices: Sequence[Slice], setting: Setting) -> Draft:
        fed = feed(_deliveries(slices, setting), setting.links)
        return Draft((*fed, *_in_place(slices)), 0.0)

    return strategy


Strategy = Callable[[Sequence[Slice], Setting], Draft]

STRATEGIES: dict[str, Strategy] = {  # those that win most often first
    "broadcast": broadcast,
    "tile_all_gather": tile_all_gather,
    "send_recv": send_recv,
    "two_level_broadcast": two_level_broadcast,
    "local_all_gather": local_all_gather,
    "global_all_gather": global_all_gather,
    "star": fan(fans.star),
    "exchange": fan(fans.exchange),
    "parallel_chains": fan(fans.parallel_chains),
}
FANS = ("star", "exchange", "parallel_chains")


def candidates(slices: Sequence[Slice], most_receivers: int = 192) -> tuple[str, ...]:
    """Return the strategies worth comparing: only broadcast where it is the same or far simpler.

    With one receiver per slice all strategies are the same copies; with very many receivers those
    that send a message to each are floods of small ones.
    """
    if all(len(piece.receivers) <= 1 for piece in slices):
        return ("broadcast",)
    count = sum(len(piece.receivers) for piece in slices)
    if count > most_receivers:
        few = ("tile_all_gather", "two_level_broadcast", "broadcast")
        return (*few, "send_recv") if count <= 2 * most_receivers else few
    others = (name for name in STRATEGIES if name != "tile_all_gather" and name not in FANS)
    return ("tile_all_gather", *others)


def _deliveries(slices: Sequence[Slice], setting: Setting) -> list[Delivery]:
    """Return what must move: receivers beside a holder are fed inside their host."""
    host_of, found = setting.host_of, []
    for piece in slices:
        holder_hosts = {host_of[device] for device in piece.holders}
        for host in bounding_hosts(piece.receivers, host_of):
            if host in holder_hosts:
                inside = tuple(d for d in piece.receivers if host_of[d] == host)
                beside = tuple(d for d in piece.holders if host_of[d] == host)
                found.append(Delivery(piece, beside, inside, remote=False))
        far = tuple(
            device
            for host in bounding_hosts(piece.receivers, host_of)
            if host not in holder_hosts
            for device in piece.receivers
            if host_of[device] == host
        )
        if far:
            found.append(Delivery(piece, piece.holders, far, remote=True))
    return found


def _ordered(
    deliveries: Sequence[Delivery], setting: Setting, *, scattered: bool = False
) -> tuple[list[tuple[Delivery, int]], float]:
    """Return deliveries in issue order with their senders, and the makespan of the lane model."""
    links = setting.links
    jobs = [
        Job(
            seconds=_chain_seconds(delivery, links, scattered) + delivery.gather_seconds,
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


def _chain_seconds(delivery: Delivery, links: Links, scattered: bool) -> float:
    """Return what a delivery takes from its first sender, with the network to itself."""
    chain = (delivery.senders[0], *delivery.receivers)
    rates = [links.hop_rate(a, b) for a, b in itertools.pairwise(chain)]
    size, slowest = delivery.piece.num_bytes, min(rates)
    if scattered:
        return size / slowest + links.network.latency
    count = links.network.num_chunks(size, rates)
    fill = (sum(size / rate for rate in rates) - size / slowest) / count
    return size / slowest + fill + links.network.latency * (count + len(rates) - 1)


def _scattered(slices: Sequence[Slice], deliveries: Sequence[Delivery], setting: Setting) -> Draft:
    """Return scatter copies and the gather behind them for each delivery, in balanced order."""
    transfers = _in_place(slices)
    chosen, seconds = _ordered(deliveries, setting, scattered=True)
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
