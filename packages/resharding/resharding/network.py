"""The network a plan is made for: rates of hosts and devices, and how operations are issued."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen
from attrs.validators import optional

from alpa_interchange.check import non_negative, positive
from alpa_interchange.cluster import ClusterSpec

ISSUE_MODELS = ("host", "device", "none")


@frozen(kw_only=True)
class HostLinks:
    """What one host has that differs from the `Network`; None is as on every other host."""

    host: int
    nic_bandwidth: float | None = field(default=None, validator=optional(positive))
    num_nics: int | None = field(default=None, validator=optional(positive))
    device_bandwidth: float | None = field(default=None, validator=optional(positive))


@frozen(kw_only=True)
class Network:
    """A switch without blocking between hosts; all ports are full duplex.

    `nic_bandwidth` is what one network card sends and receives, `device_bandwidth` what a device
    sends and receives over its own port, inside the host or through a card: bytes/s. A host has
    `num_nics` cards; its devices share them in equal consecutive groups (the first half of the
    devices uses the first of two cards). `hosts` names the hosts with other links. `latency` is
    charged per hop and chunk, seconds.

    A broadcast chain is cut into chunks of `chunk_bytes` when latency is 0, or into as many as keep
    the time to fill the chain under 0.4 per cent; with latency, into the number that finishes
    first. No chunk is smaller than `least_chunk_bytes`.

    `issue` says how a participant works off its operations: "host": one at a time per host, in plan
    order (a worker that blocks: the model of arXiv 2211.05322), "device": one at a time per device
    (a stream), "none": everything at once.
    """

    nic_bandwidth: float = field(default=1.25e9, validator=positive)
    device_bandwidth: float = field(default=25e9, validator=positive)
    num_nics: int = field(default=1, validator=positive)
    hosts: tuple[HostLinks, ...] = ()
    latency: float = field(default=0.0, validator=non_negative)
    chunk_bytes: float = field(default=131072.0, validator=positive)
    least_chunk_bytes: float = field(default=1.0, validator=positive)
    issue: str = "host"

    def __attrs_post_init__(self) -> None:
        if self.issue not in ISSUE_MODELS:
            raise ValueError(f"Network.issue must be one of {ISSUE_MODELS}, got {self.issue!r}")
        named = [links.host for links in self.hosts]
        if len(set(named)) != len(named):
            raise ValueError(f"Network.hosts must name each host once, got {named}")

    def num_chunks(self, num_bytes: float, rates: Sequence[float]) -> int:
        """Return how many pieces to cut a chain broadcast into; `rates`: bytes/s of each hop.

        With K chunks the last receiver is done at D/b + f/K + (K + H - 1) latency, where f is the
        sum of D/b over the hops less the slowest one: the best K is the root of f/latency. Without
        latency a message costs nothing, and 0.4 per cent of fill is below what a plan is searched
        on for (`PlanOptions.good_enough`).
        """
        if len(rates) < 2 or num_bytes <= 0:
            return 1
        fill = sum(num_bytes / rate for rate in rates) - num_bytes / min(rates)
        most = max(1, int(num_bytes // self.least_chunk_bytes))
        if self.latency > 0:
            wanted = math.sqrt(fill / self.latency)  # the best of those beside it is the best
            few = max(1, math.floor(wanted))
            wanted = few + (
                fill / few + few * self.latency > fill / (few + 1) + (few + 1) * self.latency
            )
        else:
            wanted = max(num_bytes / self.chunk_bytes, 250 * fill * min(rates) / num_bytes)
        return max(1, min(most, math.ceil(wanted)))


def network_of(cluster: ClusterSpec, issue: str = "device") -> Network:
    """Return the network of a cluster; hosts are numbered through its groups.

    The latency is that of the slowest group: a hop between groups has that of both ends.
    """
    first = cluster.host_groups[0]
    hosts: list[HostLinks] = []
    for group in cluster.host_groups:
        same = group.inter_host == first.inter_host and group.num_nics == first.num_nics
        same = same and group.intra_host == first.intra_host
        for host in range(len(hosts), len(hosts) + group.num_hosts):
            links = HostLinks(
                host=host,
                nic_bandwidth=None if same else group.inter_host.effective_bandwidth,
                num_nics=None if same else group.num_nics,
                device_bandwidth=None if same else group.intra_host.effective_bandwidth,
            )
            hosts.append(links)
    return Network(
        nic_bandwidth=first.inter_host.effective_bandwidth,
        num_nics=first.num_nics,
        device_bandwidth=first.intra_host.effective_bandwidth,
        latency=max(group.inter_host.latency for group in cluster.host_groups),
        hosts=tuple(links for links in hosts if links.nic_bandwidth is not None),
        issue=issue,
    )


class Links:
    """The ports of the devices of one task on a network.

    A port is a number: `out[device]` and `into[device]` are those of a device, `cards_out[device]`
    and `cards_in[device]` those of the card it uses; `rate[port]` is its bandwidth, bytes/s.
    `direction[port]` of a card is 2 host + 1 where it sends, 2 host where it receives;
    `roomy[port]` is the host of a device whose port carries as much as all cards of the host.
    """

    def __init__(self, network: Network, host_of: Mapping[int, int]) -> None:
        self.network, self.host_of = network, host_of
        special = {links.host: links for links in network.hosts}
        self.rate: list[float] = []
        self.out: dict[int, int] = {}
        self.into: dict[int, int] = {}
        self.cards_out: dict[int, int] = {}
        self.cards_in: dict[int, int] = {}
        self.card_rate: dict[int, float] = {}
        self.host_rate: dict[int, float] = {}  # all cards in use; one of them where hosts block
        self.device_rate: dict[int, float] = {}
        self.num_cards: dict[int, int] = {}
        self.direction: dict[int, int] = {}
        self.roomy: dict[int, int] = {}
        self._hop_rate: dict[tuple[int, int], float] = {}
        by_host: dict[int, list[int]] = {}
        for device in sorted(host_of):
            by_host.setdefault(host_of[device], []).append(device)
        for host, devices in by_host.items():
            own = special.get(host, HostLinks(host=host))
            card_rate = own.nic_bandwidth or network.nic_bandwidth
            device_rate = own.device_bandwidth or network.device_bandwidth
            count = min(own.num_nics or network.num_nics, len(devices))
            cards = [self._pair(card_rate) for _ in range(count)]
            self.card_rate[host], self.num_cards[host] = card_rate, count
            self.host_rate[host] = card_rate * (1 if network.issue == "host" else count)
            for out, into in cards:
                self.direction[out], self.direction[into] = 2 * host + 1, 2 * host
            for k, device in enumerate(devices):
                self.cards_out[device], self.cards_in[device] = cards[k * count // len(devices)]
                self.out[device], self.into[device] = self._pair(device_rate)
                self.device_rate[device] = device_rate
                if device_rate >= card_rate * count:
                    self.roomy[self.out[device]] = self.roomy[self.into[device]] = host

    def _pair(self, rate: float) -> tuple[int, int]:
        self.rate += [rate, rate]
        return len(self.rate) - 2, len(self.rate) - 1

    def ports(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Return the ports a hop passes through."""
        inner = (self.out[sender], self.into[receiver])
        if self.host_of[sender] == self.host_of[receiver]:
            return inner
        return (*inner, self.cards_out[sender], self.cards_in[receiver])

    def hop_rate(self, sender: int, receiver: int) -> float:
        """Return the rate of an uncontended hop, bytes/s."""
        known = self._hop_rate.get((sender, receiver))
        if known is None:
            known = min([self.rate[port] for port in self.ports(sender, receiver)])
            self._hop_rate[sender, receiver] = known
        return known
