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
import math
from collections.abc import Callable, Sequence

from attrs import evolve

from alpa_interchange.reshard import Transfer
from resharding import fans, relays
from resharding.division import Delivery, divided
from resharding.drafts import (
    Draft,
    Setting,
    chains,
    copy_of,
    deliveries_of,
    gather_of,
    in_order,
    local_transfers,
    spread,
)
from resharding.network import Links
from resharding.slices import Slice, bounding_hosts, by_host, split_box
from resharding.tiles import (
    TILES,
    tile_all_gather,
    tile_exchange,
    tile_host_gather,
    tile_tree,
    tiles_by_rounds,
)
from resharding.trees import slice_trees

# Parts of all slices together where hosts have several cards: 60 random pairs with 8 cards at 10 us
# are at 1.0396 x the bound with 4,043 transfers, with 256 at 1.0386 with 4,657, without at 1.0422.
_MOST_PARTS = 128
# Deliveries with which what all starts at once is still ordered in rounds, which cut it further:
# with more, the slowest of 600 pairs with 8 cards at 10 us is planned in 64 ms in place of 712, and
# plans are within 2 % (0.003 % in the mean).
_MOST_ORDERED = 64
# Slices that enter by several cards where devices block: with 16 two of those pairs take 11 and 2 %
# longer, and the slowest is planned in 109 ms in place of 76.
_MOST_BY_ENTRY = 8
# Slices for `slice_tree`, each as often as it is wanted: all copies are looked at for each.
_MOST_IN_TREES = 64
_TAIL = 0.1  # of what a chain's bytes take: what its last chunks may take behind them


def send_recv(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a copy per slice and receiver, with senders and order balanced over the hosts."""
    deliveries = [
        Delivery(delivery.piece, delivery.senders, (receiver,), delivery.remote)
        for delivery in deliveries_of(slices, setting)
        for receiver in delivery.receivers
    ]
    chosen, seconds = in_order(deliveries, setting)
    copies = [copy_of(each.piece.box, sender, each.receivers[0]) for each, sender in chosen]
    return Draft((*local_transfers(slices), *copies), seconds)


def broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a chunked chain per slice, with senders and order balanced over the hosts."""
    chosen, seconds = in_order(deliveries_of(slices, setting), setting)
    return Draft((*local_transfers(slices), *chains(chosen, setting)), seconds)


def divided_broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return chains of slices divided over their holders, in the order of an open shop."""
    links = setting.links
    whole = deliveries_of(slices, setting)
    issue, deliveries = links.network.issue, whole
    if issue == "none" or issue == "device" and len(whole) <= _MOST_BY_ENTRY:
        deliveries = [part for each in whole for part in _by_entry(each, links, len(whole))]

    def lanes_of(delivery: Delivery, sender: int) -> frozenset[int]:
        return _lanes((sender, *delivery.receivers), links)

    def rate_of(delivery: Delivery, sender: int) -> float:
        chain = (sender, *delivery.receivers)
        return min(links.hop_rate(a, b) for a, b in itertools.pairwise(chain))

    ordered = issue != "none" or len(deliveries) <= _MOST_ORDERED
    chosen = divided(deliveries, lanes_of, rate_of, ordered=ordered)
    return Draft((*local_transfers(slices), *chains(chosen, setting)), 0.0)


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


def _by_entry(delivery: Delivery, links: Links, num_deliveries: int) -> list[Delivery]:
    """Return parts of a delivery, one for each card through which it may enter its hosts, or as
    many more for each as save latencies side by side."""
    count = max(links.num_cards[links.host_of[device]] for device in delivery.receivers)
    count = min(count, len(delivery.receivers)) if delivery.remote else 1
    if count <= 1:
        return [delivery]
    most = max(1, _MOST_PARTS // (num_deliveries * count))
    beside = min(most, _num_beside(delivery, count, links))
    parts = []
    for k, box in enumerate(split_box(delivery.piece.box, count * beside)):
        receivers: list[int] = []
        for host in bounding_hosts(delivery.receivers, links.host_of):
            inside = [d for d in delivery.receivers if links.host_of[d] == host]
            first = k % count * len(inside) // count
            receivers += [*inside[first:], *inside[:first]]
        parts.append(evolve(delivery.part(box), receivers=tuple(receivers)))
    return parts


def _num_beside(delivery: Delivery, count: int, links: Links) -> int:
    """Return how many chains side by side are to share a card.

    A chain of `fill` seconds ends 2 sqrt(fill latency) behind its bytes (`Network.num_chunks`), m
    chains of an m-th each sqrt(m) times sooner: m is such that it is `_TAIL` of the bytes.
    """
    latency = links.network.latency
    if not latency or links.network.issue != "none":
        return 1
    size, chain = delivery.piece.num_bytes / count, (delivery.senders[0], *delivery.receivers)
    rates = [links.hop_rate(a, b) for a, b in itertools.pairwise(chain)]
    slowest = size / min(rates)
    fill = sum(size / rate for rate in rates) - slowest
    return max(1, math.ceil(4 * fill * latency / (_TAIL * slowest) ** 2))


def two_level_broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice, a chain through one device of each host and what feeds the others there.

    A chain through A hosts of B devices takes A + B latencies in place of A B. Inside a host, where
    operations do not block, copies to every device take one, and a tree log2(B + 1).
    """
    return _two_level(slices, deliveries_of(slices, setting), setting)


def card_broadcast(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a `two_level_broadcast` of parts of slices: as few as all cards of the receiving hosts
    have equally many of."""
    links, whole = setting.links, deliveries_of(slices, setting)
    num_remote = sum(each.remote for each in whole)
    deliveries = []
    for each in whole:
        inside = by_host(each.receivers, setting.host_of) if each.remote else {}
        cards = max((min(links.num_cards[host], len(inside[host])) for host in inside), default=1)
        boxes = split_box(each.piece.box, cards // math.gcd(cards, num_remote))
        deliveries += [each.part(box) for box in boxes]
    return _two_level(slices, deliveries, setting)


def _two_level(slices: Sequence[Slice], deliveries: Sequence[Delivery], setting: Setting) -> Draft:
    transfers = local_transfers(slices)
    chosen, _ = in_order(deliveries, setting)
    for number, (delivery, sender) in enumerate(chosen):
        if not delivery.remote:
            transfers += spread(delivery, sender, (), setting, len(transfers))
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
        transfers += chains([(evolve(delivery, receivers=entries), sender)], setting)
        for devices in groups:
            if len(devices) > 1:
                fed = evolve(delivery, receivers=devices[1:])
                transfers += spread(fed, devices[0], (first,), setting, len(transfers))
    return Draft(tuple(transfers), 0.0)


def local_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return, per slice and receiving host, a scatter over its devices and a gather among them."""
    deliveries = []
    for delivery in deliveries_of(slices, setting):
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
    for delivery in deliveries_of(slices, setting):
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
        fed = feed(deliveries_of(slices, setting), setting.links)
        return Draft((*fed, *local_transfers(slices)), 0.0)

    return strategy


def slice_tree(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return copies of slices by those who hold them or have been sent them (`trees`)."""
    local = local_transfers(slices)
    copies = slice_trees(slices, setting.links)
    first = len(local)
    copies = [evolve(each, after=tuple(k + first for k in each.after)) for each in copies]
    return Draft((*local, *copies), 0.0)


Strategy = Callable[[Sequence[Slice], Setting], Draft]

STRATEGIES: dict[str, Strategy] = {  # those that win most often first
    "broadcast": broadcast,
    "tile_all_gather": tile_all_gather,
    "tile_exchange": tile_exchange,
    "tile_host_gather": tile_host_gather,
    "tile_tree": tile_tree,
    "send_recv": send_recv,
    "slice_tree": slice_tree,
    "two_level_broadcast": two_level_broadcast,
    "card_broadcast": card_broadcast,
    "local_all_gather": local_all_gather,
    "global_all_gather": global_all_gather,
    "star": fan(fans.star),
    "parallel_chains": fan(fans.parallel_chains),
    "waves": fan(relays.waves),
    "paced_waves": fan(relays.paced_waves),
}
FANS = ("star", "parallel_chains")
WAVES = ("waves", "paced_waves")
CARDS = ("card_broadcast",)


def candidates(slices: Sequence[Slice], links: Links, most_receivers: int = 192) -> tuple[str, ...]:
    """Return the strategies worth comparing: only broadcast where it is the same or far simpler.

    With one receiver per slice all strategies are the same copies; with very many receivers those
    that send a message to each are floods of small ones.
    """
    if all(len(piece.receivers) <= 1 for piece in slices):
        return ("broadcast",)
    tiles = tiles_by_rounds(slices, links) if links.network.latency else ("tile_all_gather",)
    count = sum(len(piece.receivers) for piece in slices)
    trees = ("slice_tree",) if trees_pay(count, links) else ()
    if count > most_receivers:
        few = (*tiles, "two_level_broadcast", "broadcast")
        return (*few, "send_recv") if count <= 2 * most_receivers else few
    if len(tiles) > 1:
        return (*tiles[:3], "broadcast", *trees, "send_recv", "two_level_broadcast")
    skipped = (*TILES, *FANS, *WAVES, *CARDS, "slice_tree")
    others = [name for name in STRATEGIES if name not in skipped]
    return (*tiles, *others)


def trees_pay(count: int, links: Links) -> bool:
    """Return whether `slice_tree` is tried for a number of slices, as often as each is wanted."""
    return count <= _MOST_IN_TREES and links.network.issue != "none"


def _scattered(slices: Sequence[Slice], deliveries: Sequence[Delivery], setting: Setting) -> Draft:
    """Return scatter copies and the gather behind them for each delivery, in balanced order."""
    transfers = local_transfers(slices)
    chosen, seconds = in_order(deliveries, setting, scattered=True)
    for delivery, sender in chosen:
        box, receivers = delivery.piece.box, delivery.receivers
        first, host_of = len(transfers), setting.host_of
        beside = [d for d in delivery.senders if host_of[d] == host_of[sender]]
        k = beside.index(sender)
        turns = itertools.cycle((*beside[k:], *beside[:k]))  # devices, and cards, of the sender
        parts = split_box(box, len(receivers))
        for one, receiver, part in zip(turns, receivers, parts, strict=False):
            transfers.append(copy_of(part, one, receiver))
        if len(receivers) > 1:
            transfers.append(gather_of(box, receivers, tuple(range(first, len(transfers)))))
    return Draft(tuple(transfers), seconds)
