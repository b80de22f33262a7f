"""The network a plan is made for: rates of hosts and devices, and how operations are issued."""

from __future__ import annotations

import math

from attrs import field, frozen

from alpa_interchange.check import non_negative, positive

ISSUE_MODELS = ("host", "device", "none")


@frozen(kw_only=True)
class Network:
    """A switch without blocking between hosts of equal kind; all ports are full duplex.

    `nic_bandwidth` is what a host sends and receives over its network card, `device_bandwidth`
    what a device sends and receives over its own port, inside the host or through the card:
    bytes/s. `latency` is charged per hop and chunk, seconds. `chunk_bytes` is the size of the
    pieces a broadcast chain is cut into when latency is 0, `least_chunk_bytes` the smallest useful
    piece.

    `issue` says how a participant works off its operations: "host": one at a time per host, in plan
    order (a worker that blocks: the model of arXiv 2211.05322), "device": one at a time per device
    (a stream), "none": everything at once.
    """

    nic_bandwidth: float = field(default=1.25e9, validator=positive)
    device_bandwidth: float = field(default=25e9, validator=positive)
    latency: float = field(default=0.0, validator=non_negative)
    chunk_bytes: float = field(default=131072.0, validator=positive)
    least_chunk_bytes: float = field(default=4096.0, validator=positive)
    issue: str = "host"

    def __attrs_post_init__(self) -> None:
        if self.issue not in ISSUE_MODELS:
            raise ValueError(f"Network.issue must be one of {ISSUE_MODELS}, got {self.issue!r}")

    def hop_bandwidth(self, crosses_hosts: bool) -> float:
        """Return the rate of an uncontended hop, bytes/s."""
        if crosses_hosts:
            return min(self.nic_bandwidth, self.device_bandwidth)
        return self.device_bandwidth

    def num_chunks(self, num_bytes: float, hops: tuple[bool, ...]) -> int:
        """Return how many pieces to cut a chain broadcast into; `hops[k]`: hop k crosses hosts.

        With K chunks the last receiver is done at D/b + f/K + (K + H - 1) latency, where f is the
        sum of D/b over the hops less the slowest one: the best K is the root of f/latency. Without
        latency, chunks of `chunk_bytes`, or smaller ones until the fill costs under one per cent.
        """
        if len(hops) < 2 or num_bytes <= 0:
            return 1
        rates = [self.hop_bandwidth(crosses) for crosses in hops]
        fill = sum(num_bytes / rate for rate in rates) - num_bytes / min(rates)
        most = max(1, int(num_bytes // self.least_chunk_bytes))
        if self.latency > 0:
            wanted = math.sqrt(fill / self.latency)
        else:
            wanted = max(num_bytes / self.chunk_bytes, 100 * fill * min(rates) / num_bytes)
        return max(1, min(most, math.ceil(wanted)))
