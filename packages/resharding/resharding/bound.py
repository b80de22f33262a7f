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
    operation at a time, each slice needs an operation of its own.          -> blocked_bound
    What is sent last is passed on by nobody, so it is sent to each receiver.  -> latency_bound

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
    into_host: dict[int, float] = {}
    into_device: dict[int, float] = {}
    from_hosts: dict[frozenset[int], float] = {}
    from_devices: dict[frozenset[int], float] = {}
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
        from_devices[holders] = from_devices.get(holders, 0.0) + piece.num_bytes
    bound = max(
        receive_seconds(into_host, links.host_rate),
        send_seconds(from_hosts, links.host_rate, quantum),
        receive_seconds(into_device, links.device_rate),
        send_seconds(from_devices, links.device_rate, quantum),
    )
    if not moving:
        return 0.0
    blocked = blocked_bound(moving, links) if network.issue != "none" else 0.0
    return max(bound + network.latency, latency_bound(moving, links), blocked)


def receive_seconds(incoming: Mapping[int, float], rate: Mapping[int, float]) -> float:
    """Return the time of the busiest receiver; `incoming`: bytes, `rate`: bytes/s of each."""
    return max((amount / rate[receiver] for receiver, amount in incoming.items()), default=0.0)
