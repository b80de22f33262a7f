r"""A time no plan can beat, from what must pass through each port.

For a task with slices i of D_i bytes, held by the devices H_i and needed elsewhere by R_i:

    every host h takes in what its devices need and none of them holds:
        T >= sum {D_i : h in hosts(R_i) \ hosts(H_i)} / nic                   -> receive_seconds()
    every slice wanted by a host that lacks it leaves the hosts of H_i at least once; with x_ih
    bytes of it leaving host h, sum_h x_ih = D_i, the busiest card is at least
        T >= min_x max_h sum_i x_ih / nic = max over host sets S of
             sum {D_i : hosts(H_i) inside S} / (|S| nic)                      -> send_seconds()
    the same two for devices and their ports.                                 -> lower_bound()
    Every operation has one latency at least. Where a participant (a host or a device) does one
    operation at a time, each slice needs an operation of its own on one of its holders and on one
    of its receivers: D_i / rate + latency takes the place of D_i / rate above, and a host takes
    one latency for each of its receiving devices. In one latency the devices that have a slice
    can double at most.                                                       -> _blocked_seconds()
    What is sent last is passed on by nobody, so it is sent to each receiver.  -> latency_bound

The minimum over x is found with maximum flows: start from T = total / all cards, and as long as the
flow does not fit, the minimum cut names a set S with a larger quotient. Each round raises T to an
exact quotient, so the last one is the maximum (Dinkelbach's method).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from resharding.latency_bound import latency_bound
from resharding.network import Links, Network
from resharding.slices import Slice


def lower_bound(slices: Iterable[Slice], host_of: Mapping[int, int], network: Network) -> float:
    """Return seconds that every plan for `slices` takes at least in the model of `network`."""
    links = Links(network, host_of)
    into_host: dict[int, float] = {}
    into_device: dict[int, float] = {}
    from_hosts: dict[frozenset[int], float] = {}
    from_devices: dict[frozenset[int], float] = {}
    receiving: dict[int, set[int]] = {}
    quantum, moving = 0.0, [piece for piece in slices if piece.receivers]
    for piece in moving:
        quantum = piece.num_bytes / piece.box.size
        holders = frozenset(piece.holders)
        holder_hosts = frozenset(host_of[device] for device in piece.holders)
        lacking = {host_of[device] for device in piece.receivers} - holder_hosts
        for host in lacking:
            into_host[host] = into_host.get(host, 0.0) + piece.num_bytes
        if lacking:
            from_hosts[holder_hosts] = from_hosts.get(holder_hosts, 0.0) + piece.num_bytes
        for device in piece.receivers:
            into_device[device] = into_device.get(device, 0.0) + piece.num_bytes
            receiving.setdefault(host_of[device], set()).add(device)
        from_devices[holders] = from_devices.get(holders, 0.0) + piece.num_bytes
    bound = max(
        receive_seconds(into_host, links.host_rate),
        send_seconds(from_hosts, links.host_rate, quantum),
        receive_seconds(into_device, links.device_rate),
        send_seconds(from_devices, links.device_rate, quantum),
    )
    if not receiving:
        return 0.0
    blocked = 0.0
    if network.issue != "none":
        blocked = _blocked_seconds(moving, links)
    if network.issue == "host":
        blocked = max(
            blocked,
            *(
                into_host.get(host, 0.0) / links.host_rate[host] + network.latency * len(devices)
                for host, devices in receiving.items()
            ),
        )
    return max(bound + network.latency, latency_bound(moving, links), blocked)


def _blocked_seconds(moving: Iterable[Slice], links: Links) -> float:
    """Return the time of the busiest participant when each does one operation at a time."""
    by_host, host_of = links.network.issue == "host", links.host_of
    rate = links.host_rate if by_host else links.device_rate
    sending: dict[frozenset[int], float] = {}
    taking: dict[frozenset[int], float] = {}
    spread = 0  # rounds of one latency, in each of which the devices with the slice can double
    for piece in moving:
        holders, takers = frozenset(piece.holders), frozenset(piece.receivers)
        if by_host:
            holders = frozenset(host_of[device] for device in holders)
            takers = frozenset(host_of[device] for device in takers) - holders
            if not takers:
                continue
        least = piece.num_bytes / max(rate[each] for each in holders) + links.network.latency
        sending[holders] = sending.get(holders, 0.0) + least
        least = piece.num_bytes / max(rate[each] for each in takers) + links.network.latency
        taking[takers] = taking.get(takers, 0.0) + least
        spread = max(spread, math.ceil(math.log2(1 + len(piece.receivers) / len(piece.holders))))
    alike = dict.fromkeys(rate, 1.0)
    return max(
        send_seconds(sending, alike),
        send_seconds(taking, alike),
        spread * links.network.latency,
    )


def receive_seconds(incoming: Mapping[int, float], rate: Mapping[int, float]) -> float:
    """Return the time of the busiest receiver; `incoming`: bytes, `rate`: bytes/s of each."""
    return max((amount / rate[receiver] for receiver, amount in incoming.items()), default=0.0)


def send_seconds(
    outgoing: Mapping[frozenset[int], float], rate: Mapping[int, float], quantum: float = 0.0
) -> float:
    """Return the least time in which senders of `rate` bytes/s can share the load.

    `outgoing[S]` bytes may leave through any of the senders in S, in parts of whole `quantum`s.
    """
    if not outgoing:
        return 0.0
    groups = list(outgoing)
    crowd = {sender for group in groups for sender in group}
    if sum(map(len, groups)) == len(crowd):  # no sender in two groups: each group for itself
        return max(
            _in_whole(
                amount, [rate[s] for s in group], amount / sum(rate[s] for s in group), quantum
            )
            for group, amount in outgoing.items()
        )
    amount = sum(outgoing.values())
    level = amount / sum(rate[sender] for sender in crowd)
    while True:
        capacity = {sender: level * rate[sender] for sender in rate}
        blocked = _overloaded(groups, [outgoing[group] for group in groups], capacity)
        if not blocked:
            break
        smaller = {sender for k in blocked for sender in groups[k]}
        inside = sum(outgoing[group] for group in groups if group <= smaller)
        raised = inside / sum(rate[sender] for sender in smaller)
        if raised <= level * (1 + 1e-12):
            break
        level, crowd, amount = raised, smaller, inside
    return _in_whole(amount, [rate[sender] for sender in crowd], level, quantum)


def _in_whole(amount: float, rates: Sequence[float], level: float, quantum: float) -> float:
    """Return the time in which senders pass `amount` bytes when each passes whole quanta."""
    if quantum <= 0 or len(rates) == 1:
        return level
    parts = [math.floor(level * rate / quantum + 1e-6) for rate in rates]
    for _ in range(round(amount / quantum) - sum(parts)):
        k = min(range(len(rates)), key=lambda j: (parts[j] + 1) / rates[j])
        parts[k] += 1
        level = max(level, parts[k] * quantum / rates[k])
    return level


def _overloaded(
    groups: list[frozenset[int]], amounts: list[float], passes: Mapping[int, float]
) -> list[int]:
    """Return the groups on the source side of a minimum cut; `passes`: bytes of each sender.

    Nodes: 0 source, 1.. groups, then senders, last sink. Empty when everything passes.
    """
    senders = sorted({sender for group in groups for sender in group})
    number = {sender: 1 + len(groups) + k for k, sender in enumerate(senders)}
    sink = 1 + len(groups) + len(senders)
    capacity: list[dict[int, float]] = [{} for _ in range(sink + 1)]
    for k, (group, amount) in enumerate(zip(groups, amounts, strict=True)):
        capacity[0][1 + k] = amount
        capacity[1 + k][0] = 0.0
        for sender in group:
            capacity[1 + k][number[sender]] = amount
            capacity[number[sender]][1 + k] = 0.0
    for sender in senders:
        capacity[number[sender]][sink] = passes[sender]
        capacity[sink][number[sender]] = 0.0
    tiny = 1e-12 * sum(amounts)
    while True:
        parent = _shortest_paths(capacity, tiny)
        if sink not in parent:
            break
        node, pushed = sink, float("inf")
        while node:
            pushed = min(pushed, capacity[parent[node]][node])
            node = parent[node]
        node = sink
        while node:
            capacity[parent[node]][node] -= pushed
            capacity[node][parent[node]] += pushed
            node = parent[node]
    return [k for k in range(len(groups)) if 1 + k in parent]


def _shortest_paths(capacity: list[dict[int, float]], tiny: float) -> dict[int, int]:
    """Return the predecessor of every node that residual capacity reaches from node 0."""
    parent, frontier = {0: 0}, deque([0])
    while frontier:
        node = frontier.popleft()
        for neighbour, room in capacity[node].items():
            if room > tiny and neighbour not in parent:
                parent[neighbour] = node
                frontier.append(neighbour)
    return parent
