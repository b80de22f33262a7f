r"""A time no plan can beat, from what must pass through each port.

For a task with slices i of D_i bytes, held by the devices H_i and needed elsewhere by R_i:

    every slice wanted by a host h that holds none of it comes in by the cards of those who want it
    there; with x_ic bytes of it through card c, sum_c x_ic = D_i, the busiest card takes at least
        T >= min_x max_c sum_i x_ic / nic = max over sets S of cards of
             sum {D_i : cards(R_i in h) inside S} / (|S| nic)                 -> send_seconds()
    every slice wanted by a host that lacks it leaves the hosts of H_i at least once, by the cards
    of those who hold it or want it there:
        T >= max over S of sum {D_i : cards(H_i + R_i in hosts(H_i)) inside S} / (|S| nic)
    every device takes in what it needs, and every slice leaves those who hold it, by the ports of
    devices.                                                                  -> receive_seconds()
    Every operation has one latency at least. Where a participant (a host or a device) does one
    operation at a time, each slice needs an operation of its own.          -> blocked_bound
    What is sent last is passed on by nobody, so it is sent to each receiver.  -> latency_bound

Where hosts do one operation at a time, each stands for one of its cards: a copy or a chain moves
its bytes once, at the rate of a card at most; a ring over n devices of which the least owner has m
of D bytes takes (D - m) / card, and brings a host no more than D - m that it lacks, nor takes more
out of it. In a latency that one operation of n hops takes, others double n times.  -> _cards()

A slice is passed on by those who hold it and those who want it, since a device takes in nothing but
parts of its tiles (`coverage` refuses other plans).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resharding.blocked_bound import blocked_bound
from resharding.latency_bound import latency_bound
from resharding.minimum_cut import send_seconds
from resharding.network import Links, Network
from resharding.slices import Slice


def lower_bound(slices: Iterable[Slice], host_of: Mapping[int, int], network: Network) -> float:
    """Return seconds that every plan for `slices` takes at least in the model of `network`."""
    links = Links(network, host_of)
    into_cards: dict[frozenset[int], float] = {}
    into_device: dict[int, float] = {}
    from_cards: dict[frozenset[int], float] = {}
    from_devices: dict[frozenset[int], float] = {}
    quantum, moving = 0.0, [piece for piece in slices if piece.receivers]
    cards_out, cards_in = _cards(links)
    for piece in moving:
        quantum = piece.num_bytes / piece.box.size
        holders = frozenset(piece.holders)
        holder_hosts = frozenset(host_of[device] for device in piece.holders)
        lacking: dict[int, set[int]] = {}  # the cards of those who want it, by host
        leaving = {cards_out[device] for device in piece.holders}
        for device in piece.receivers:
            host = host_of[device]
            if host in holder_hosts:
                leaving.add(cards_out[device])
            else:
                lacking.setdefault(host, set()).add(cards_in[device])
            into_device[device] = into_device.get(device, 0.0) + piece.num_bytes
        for cards in lacking.values():
            _add(into_cards, frozenset(cards), piece.num_bytes)
        if lacking:
            _add(from_cards, frozenset(leaving), piece.num_bytes)
        _add(from_devices, holders, piece.num_bytes)
    rates = dict(enumerate(links.rate))
    bound = max(
        send_seconds(into_cards, rates, quantum),
        send_seconds(from_cards, rates, quantum),
        receive_seconds(into_device, links.device_rate),
        send_seconds(from_devices, links.device_rate, quantum),
    )
    if not moving:
        return 0.0
    blocked = blocked_bound(moving, links) if network.issue != "none" else 0.0
    return max(bound + network.latency, latency_bound(moving, links), blocked)


def _cards(links: Links) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Return the cards by which devices send and receive: one a host if it does one operation at a
    time."""
    if links.network.issue != "host":
        return links.cards_out, links.cards_in
    first: dict[int, int] = {}
    for device in links.cards_out:
        first.setdefault(links.host_of[device], device)
    one = {device: first[links.host_of[device]] for device in links.cards_out}
    return (
        {device: links.cards_out[head] for device, head in one.items()},
        {device: links.cards_in[head] for device, head in one.items()},
    )


def _add(amounts: dict[frozenset[int], float], ports: frozenset[int], amount: float) -> None:
    amounts[ports] = amounts.get(ports, 0.0) + amount


def receive_seconds(incoming: Mapping[int, float], rate: Mapping[int, float]) -> float:
    """Return the time of the busiest receiver; `incoming`: bytes, `rate`: bytes/s of each."""
    return max((amount / rate[receiver] for receiver, amount in incoming.items()), default=0.0)
