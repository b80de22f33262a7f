r"""A time no plan can beat, from what must pass through each port.

For a task with slices i of D_i bytes, held by the devices H_i and needed elsewhere by R_i:

    every host h takes in what its devices need and none of them holds:
        T >= sum {D_i : h in hosts(R_i) \ hosts(H_i)} / nic                   -> receive_seconds()
    every slice wanted by a host that lacks it leaves the hosts of H_i at least once; with x_ih
    bytes of it leaving host h, sum_h x_ih = D_i, the busiest card is at least
        T >= min_x max_h sum_i x_ih / nic = max over host sets S of
             sum {D_i : hosts(H_i) inside S} / (|S| nic)                      -> send_seconds()
    the same two for devices and their ports.

The minimum over x is found with maximum flows: start from T = total / all cards, and as long as the
flow does not fit, the minimum cut names a set S with a larger quotient. Each round raises T to an
exact quotient, so the last one is the maximum (Dinkelbach's method).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from resharding.network import Network
from resharding.slices import Slice


def lower_bound(slices: Iterable[Slice], host_of: Mapping[int, int], network: Network) -> float:
    """Return seconds that every plan for `slices` takes at least in the model of `network`."""
    into_host: dict[int, float] = {}
    into_device: dict[int, float] = {}
    from_hosts: dict[frozenset[int], float] = {}
    from_devices: dict[frozenset[int], float] = {}
    for piece in slices:
        if not piece.receivers:
            continue
        holders = frozenset(piece.holders)
        holder_hosts = frozenset(host_of[device] for device in piece.holders)
        lacking = {host_of[device] for device in piece.receivers} - holder_hosts
        for host in lacking:
            into_host[host] = into_host.get(host, 0.0) + piece.num_bytes
        if lacking:
            from_hosts[holder_hosts] = from_hosts.get(holder_hosts, 0.0) + piece.num_bytes
        for device in piece.receivers:
            into_device[device] = into_device.get(device, 0.0) + piece.num_bytes
        from_devices[holders] = from_devices.get(holders, 0.0) + piece.num_bytes
    bound = max(
        receive_seconds(into_host, network.nic_bandwidth),
        send_seconds(from_hosts, network.nic_bandwidth),
        receive_seconds(into_device, network.device_bandwidth),
        send_seconds(from_devices, network.device_bandwidth),
    )
    return bound + (network.latency if bound > 0 else 0.0)


def receive_seconds(incoming: Mapping[int, float], bandwidth: float) -> float:
    """Return the time of the busiest receiver; `incoming`: bytes per receiver."""
    return max(incoming.values(), default=0.0) / bandwidth


def send_seconds(outgoing: Mapping[frozenset[int], float], bandwidth: float) -> float:
    """Return the least time in which senders of equal `bandwidth` can share the load.

    `outgoing[S]` bytes may leave through any of the senders in S, in parts.
    """
    if not outgoing:
        return 0.0
    groups = list(outgoing)
    senders = sorted({sender for group in groups for sender in group})
    level = sum(outgoing.values()) / len(senders)
    while True:
        blocked = _overloaded(groups, [outgoing[group] for group in groups], senders, level)
        if not blocked:
            return level / bandwidth
        crowd = {sender for k in blocked for sender in groups[k]}
        raised = sum(outgoing[group] for group in groups if group <= crowd) / len(crowd)
        if raised <= level * (1 + 1e-12):
            return level / bandwidth
        level = raised


def _overloaded(
    groups: list[frozenset[int]], amounts: list[float], senders: list[int], level: float
) -> list[int]:
    """Return the groups on the source side of a minimum cut when each sender passes `level` bytes.

    Nodes: 0 source, 1.. groups, then senders, last sink. Empty when everything passes.
    """
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
        capacity[number[sender]][sink] = level
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
