from typing import Any

import pytest

from alpa_interchange.cluster import ClusterSpec, DeviceSpec, GroupLink, HostGroup, LinkSpec
from alpa_interchange.document import from_json, to_json

FAST = DeviceSpec(
    name="fast", memory=80e9, memory_bandwidth=2e12, peak_flops={"bfloat16": 3e14}, num_units=108
)
SLOW = DeviceSpec(name="slow", memory=16e9, memory_bandwidth=9e11, peak_flops={"float16": 1e14})
BUS = LinkSpec(name="bus", bandwidth=3e11, latency=2e-6, efficiency=0.8)
WIRE = LinkSpec(name="wire", bandwidth=2.5e10, latency=5e-6)
THIN = LinkSpec(name="thin", bandwidth=3e9, latency=3e-5)


def group(device: DeviceSpec, inter: LinkSpec, hosts: int = 2) -> HostGroup:
    return HostGroup(
        device=device, num_hosts=hosts, devices_per_host=8, intra_host=BUS, inter_host=inter
    )


def mixed(**more: Any) -> ClusterSpec:
    groups = (group(FAST, WIRE), group(SLOW, THIN, hosts=1), group(SLOW, THIN, hosts=1))
    return ClusterSpec(name="mixed", host_groups=groups, **more)


def test_a_cluster_of_mixed_devices_survives_a_round_trip_through_json() -> None:
    spec = mixed(inter_group=THIN, group_links=(GroupLink(first=0, second=1, link=WIRE),))
    assert from_json(to_json(spec), ClusterSpec) == spec
    assert spec.num_devices == 32


def test_effective_bandwidth_is_the_stated_one_times_the_share_that_is_reached() -> None:
    assert BUS.effective_bandwidth == pytest.approx(2.4e11)
    assert WIRE.effective_bandwidth == WIRE.bandwidth


def test_groups_without_a_link_of_their_own_are_joined_by_the_slower_interface() -> None:
    assert mixed().link_between(0, 1) == THIN
    assert mixed().link_between(0, 0) == WIRE


def test_a_pair_of_groups_with_its_own_link_uses_it_in_both_directions() -> None:
    spec = mixed(inter_group=THIN, group_links=(GroupLink(first=0, second=1, link=WIRE),))
    assert spec.link_between(0, 1) == spec.link_between(1, 0) == WIRE
    assert spec.link_between(0, 2) == THIN


@pytest.mark.parametrize("second", [0, 3])
def test_a_group_link_must_join_two_different_known_groups(second: int) -> None:
    with pytest.raises(ValueError, match="two different host groups below 3"):
        mixed(group_links=(GroupLink(first=0, second=second, link=WIRE),))


@pytest.mark.parametrize("efficiency", [0.0, 1.5])
def test_an_efficiency_must_be_a_share(efficiency: float) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        LinkSpec(name="x", bandwidth=1.0, latency=0.0, efficiency=efficiency)


@pytest.mark.parametrize("peaks", [{}, {"float32": 0.0}])
def test_a_device_needs_a_peak_above_zero(peaks: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="peak_flops"):
        DeviceSpec(name="x", memory=1.0, memory_bandwidth=1.0, peak_flops=peaks)
