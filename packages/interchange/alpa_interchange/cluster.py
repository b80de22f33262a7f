"""Hardware: devices, links, groups of identical hosts, clusters. All quantities are SI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from alpa_interchange.check import non_empty, non_negative, positive, share


def _peaks(owner: Any, attribute: Any, value: Mapping[str, float]) -> None:
    if not value:
        raise ValueError(
            "DeviceSpec.peak_flops must name at least one dtype, such as float32, got none"
        )
    for dtype, peak in value.items():
        if not peak > 0:
            raise ValueError(f"DeviceSpec.peak_flops[{dtype!r}] must be above 0, got {peak!r}")


@frozen(kw_only=True)
class DeviceSpec:
    """One kind of accelerator (or host CPU share)."""

    name: str = field(validator=non_empty)
    memory: float = field(validator=positive)  # bytes a program may use
    memory_bandwidth: float = field(validator=positive)  # bytes/s
    # dense flop/s by dtype name: float32, bfloat16, ...
    peak_flops: Mapping[str, float] = field(validator=_peaks, hash=False)
    launch_latency: float = field(default=0.0, validator=non_negative)  # seconds per kernel
    source: str = ""  # where the constants come from
    num_units: int = field(default=1, validator=positive)  # processors that share tiles (SMs)
    platform: str = "gpu"  # "gpu", "tpu" or "cpu"
    sustained: float = field(default=1.0, validator=share)  # of the peaks, held under matmul load


@frozen(kw_only=True)
class LinkSpec:
    """One kind of connection, as seen by one end of it."""

    name: str = field(validator=non_empty)
    bandwidth: float = field(validator=positive)  # bytes/s in one direction, as the maker states it
    latency: float = field(validator=non_negative)  # seconds
    source: str = ""
    efficiency: float = field(default=1.0, validator=share)  # share of `bandwidth` that is reached

    @property
    def effective_bandwidth(self) -> float:
        """Return the bytes/s that large transfers reach in one direction."""
        return self.bandwidth * self.efficiency


@frozen(kw_only=True)
class HostGroup:
    """Identical hosts: each has `devices_per_host` devices and `num_nics` network interfaces."""

    device: DeviceSpec
    num_hosts: int = field(validator=positive)
    devices_per_host: int = field(validator=positive)
    intra_host: LinkSpec  # per device
    inter_host: LinkSpec  # per network interface
    num_nics: int = field(default=1, validator=positive)
    rail: bool = False  # True: device i of a host owns nic i mod num_nics; False: all share all
    host_link: LinkSpec | None = None  # between a device and the memory of its host
    shared_compute: bool = False  # True: `device` is the whole host, and its devices share it

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


@frozen(kw_only=True)
class GroupLink:
    """The connection between the hosts of two groups, as seen by one host."""

    first: int = field(validator=non_negative)  # host group numbers
    second: int = field(validator=non_negative)
    link: LinkSpec


@frozen(kw_only=True)
class ClusterSpec:
    """Groups of hosts. Devices are numbered group by group, host by host."""

    name: str = field(validator=non_empty)
    host_groups: tuple[HostGroup, ...] = field(validator=non_empty)
    inter_group: LinkSpec | None = None  # between hosts of different groups; None: the slower NIC
    # pairs of groups that `inter_group` is not right for
    group_links: tuple[GroupLink, ...] = field(default=())

    @group_links.validator
    def _known_groups(self, _: object, group_links: tuple[GroupLink, ...]) -> None:
        for pair in group_links:
            if pair.first == pair.second or max(pair.first, pair.second) >= len(self.host_groups):
                raise ValueError(
                    "ClusterSpec.group_links must join two different host groups below "
                    f"{len(self.host_groups)}, got {pair.first} and {pair.second}"
                )

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.host_groups)

    def link_between(self, first: int, second: int) -> LinkSpec:
        """Return the link between a host of group `first` and one of `second`, seen by one host."""
        if first == second:
            return self.host_groups[first].inter_host
        for pair in self.group_links:
            if {pair.first, pair.second} == {first, second}:
                return pair.link
        if self.inter_group is not None:
            return self.inter_group
        ends = (self.host_groups[first].inter_host, self.host_groups[second].inter_host)
        return min(ends, key=lambda link: link.effective_bandwidth)
