"""Strategies for small tensors: the slices of a tile are collected before the tile is spread.

n devices on A hosts want a tile of m slices of few bytes. Latencies where operations block:

    a chain for each slice                                                    m n
    tile_all_gather   slices to all devices, a ring of all of them            m / n + n - 1
    tile_exchange     slices to all devices, rings of few of them (`exchanges`)  m / n + sum (f - 1)
    tile_host_gather  slices to one device of each host, a ring of those,
                      and the whole tile from there                           m / A + A - 1 + inside
    tile_tree         slices to one device, the whole tile from there         m + log2 A + inside

with n / A or log2 (n / A) inside a host, by what blocks. The bytes of the tile pass cards twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from alpa_interchange.reshard import Transfer
from resharding.division import Delivery
from resharding.drafts import (
    Draft,
    Setting,
    chains,
    deliveries_of,
    gather_of,
    in_order,
    local_transfers,
    spread,
)
from resharding.exchanges import Exchange, factors, rings_in_turn
from resharding.listing import listed
from resharding.network import Links
from resharding.slices import Box, Slice, bounding_box, bounding_hosts, by_host

TILES = ("tile_all_gather", "tile_exchange", "tile_host_gather", "tile_tree")

_Tiles = dict[tuple[int, ...], list[Slice]]  # by the devices that want it


def tile_all_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a copy per slice to one of its receivers, and one gather per target tile."""
    tiles, others = _tiles(slices)
    owners = {
        piece.box: receivers[k * len(receivers) // len(pieces)]
        for receivers, pieces in tiles.items()
        for k, piece in enumerate(pieces)
    }
    transfers, arrived = _collected(slices, tiles, others, owners, setting)
    for receivers, pieces in tiles.items():
        transfers.append(_gather(pieces, receivers, arrived))
    return Draft(tuple(transfers), 0.0)


def tile_exchange(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return a copy per slice to one of its receivers, and small rings that gather each tile."""
    tiles, others = _tiles(slices)
    exchanges = []
    owners: dict[Box, int] = {}
    for receivers, pieces in tiles.items():
        exchange = Exchange(list(by_host(receivers, setting.host_of).values()))
        exchange.split(pieces)
        exchanges.append(exchange)
        owners |= exchange.owners
    transfers, arrived = _collected(slices, tiles, others, owners, setting)
    for exchange in exchanges:
        transfers += exchange.gathers(arrived, len(transfers))
    return Draft(tuple(transfers) if setting.unordered else listed(transfers, setting), 0.0)


def tile_host_gather(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return copies to one device of each host, a gather among those, and what feeds the others."""
    return _from_heads(slices, setting, gather=True)


def tile_tree(slices: Sequence[Slice], setting: Setting) -> Draft:
    """Return copies to one device per tile, and what feeds the others from it."""
    return _from_heads(slices, setting, gather=False)


def _from_heads(slices: Sequence[Slice], setting: Setting, *, gather: bool) -> Draft:
    tiles, others = _tiles(slices)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # the devices of each host
    owners = {}
    for number, (receivers, pieces) in enumerate(tiles.items()):
        hosts = bounding_hosts(receivers, setting.host_of)
        turn = number % len(hosts)  # tiles enter by different hosts
        groups[receivers] = [
            tuple(d for d in receivers if setting.host_of[d] == host)
            for host in (*hosts[turn:], *hosts[:turn])
        ]
        for k, piece in enumerate(pieces):
            owners[piece.box] = groups[receivers][k * len(hosts) // len(pieces) if gather else 0][0]
    transfers, arrived = _collected(slices, tiles, others, owners, setting)
    for receivers, pieces in tiles.items():
        heads = tuple(devices[0] for devices in groups[receivers])
        brought = dict.fromkeys(heads, tuple(sorted(arrived[piece.box] for piece in pieces)))
        if len(heads) > 1 and gather:
            brought = dict.fromkeys(heads, (len(transfers),))
            transfers.append(_gather(pieces, heads, arrived))
        elif len(heads) > 1:
            fed = _whole(pieces, heads[0], heads[1:])
            first = len(transfers)
            transfers += spread(fed, heads[0], brought[heads[0]], setting, first)
            for index, transfer in enumerate(transfers[first:], first):
                brought.update(dict.fromkeys(transfer.receivers, (index,)))
        for devices in groups[receivers]:
            if len(devices) > 1:
                fed = _whole(pieces, devices[0], devices[1:])
                transfers += spread(fed, devices[0], brought[devices[0]], setting, len(transfers))
    return Draft(tuple(transfers) if setting.unordered else listed(transfers, setting), 0.0)


def tiles_by_rounds(slices: Sequence[Slice], links: Links) -> tuple[str, ...]:
    """Return the strategies of this file that differ, those with the fewest latencies first; one
    where operations do not block."""
    if links.network.issue == "none":
        return TILES[:1]
    tiles, _ = _tiles(slices)
    rounds = dict.fromkeys(TILES, 0.0)
    for receivers, pieces in tiles.items():
        count, num_hosts = len(receivers), len(bounding_hosts(receivers, links.host_of))
        each = count / num_hosts
        inside = math.log2(each) if links.network.issue == "device" else each - 1
        rounds["tile_all_gather"] += len(pieces) / count + count - 1
        rounds["tile_exchange"] += len(pieces) / count + rings_in_turn(
            count // num_hosts, num_hosts, links.network.issue == "host"
        )
        rounds["tile_host_gather"] += len(pieces) / num_hosts + num_hosts - 1 + inside
        rounds["tile_tree"] += len(pieces) + math.log2(num_hosts) + inside
    alike: set[str] = set()  # those that are the same as another one
    if all(len(bounding_hosts(key, links.host_of)) == len(key) for key in tiles):
        alike.add("tile_host_gather")
    if all(len(factors(len(key))) == 1 for key in tiles):
        alike.add("tile_exchange")
    return tuple(sorted(set(TILES) - alike, key=lambda name: (rounds[name], TILES.index(name))))


def _tiles(slices: Sequence[Slice]) -> tuple[_Tiles, list[Slice]]:
    """Return the slices of tiles that several devices want and none holds a part of, and others."""
    held = {device for piece in slices for device in piece.in_place}
    tiles: _Tiles = {}
    others = []
    for piece in slices:
        if piece.in_place or len(piece.receivers) < 2 or not held.isdisjoint(piece.receivers):
            others.append(piece)
        else:
            tiles.setdefault(piece.receivers, []).append(piece)
    return tiles, others


def _collected(
    slices: Sequence[Slice],
    tiles: _Tiles,
    others: Sequence[Slice],
    owners: dict[Box, int],
    setting: Setting,
) -> tuple[list[Transfer], dict[Box, int]]:
    """Return chains for `others` and copies of the slices of tiles to their owners, and the numbers
    of those by box."""
    deliveries = deliveries_of(others, setting)
    for pieces in tiles.values():
        for piece in pieces:
            owner = owners[piece.box]
            beside = tuple(d for d in piece.holders if setting.host_of[d] == setting.host_of[owner])
            deliveries.append(Delivery(piece, beside or piece.holders, (owner,), not beside))
    chosen, _ = in_order(deliveries, setting)
    transfers = [*local_transfers(slices), *chains(chosen, setting)]
    return transfers, {Box(t.start, t.stop): k for k, t in enumerate(transfers)}


def _whole(pieces: Sequence[Slice], sender: int, receivers: tuple[int, ...]) -> Delivery:
    """Return the tile that `pieces` make up, on its way from one device to others."""
    box = bounding_box(piece.box for piece in pieces)
    size = sum(piece.num_bytes for piece in pieces)
    return Delivery(
        Slice(box=box, num_bytes=size, holders=(sender,), receivers=receivers, in_place=()),
        (sender,),
        receivers,
        remote=False,
    )


def _gather(
    pieces: Sequence[Slice], receivers: tuple[int, ...], arrived: dict[Box, int]
) -> Transfer:
    """Return the gather of slices that have arrived on `receivers`."""
    box = _whole(pieces, receivers[0], receivers).piece.box
    return gather_of(box, receivers, tuple(sorted(arrived[piece.box] for piece in pieces)))
