import pytest

from cost_model import cluster, cluster_names
from cost_model.host import quick_host_profile
from cost_model.profile import stored_profile


def test_a_name_without_a_number_is_one_host():
    spec = cluster("h100")
    assert spec.num_devices == 8 and spec.host_groups[0].num_hosts == 1


def test_devices_fill_hosts():
    assert cluster("a100-80gb:4").host_groups[0].devices_per_host == 4
    group = cluster("a100-80gb:16").host_groups[0]
    assert (group.num_hosts, group.devices_per_host) == (2, 8)


def test_every_preset_can_be_had():
    for name in cluster_names():
        assert cluster(name, measure=False).num_devices >= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "did you mean h100"),
        ("zzzzzz", "known: p3.16xlarge"),
        ("h100:12", "12 devices do not fill hosts of 8"),
        ("h100:", "must be a number of devices"),
        ("h100:-8", "must be a number of devices"),
        ("h100:0", "at least 1"),
        ("h100:8@x", "'h100:8@x': what follows '@' must be from 1% to 99%, such as 90%, got 'x'"),
        ("h100:8@1.2.3%", "got '1.2.3%'"),
        ("h100:8@200%", "got '200%'"),
        ("h100:8@0%", "got '0%'"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(name, message):
    with pytest.raises(ValueError, match=message):
        cluster(name)


def test_this_machine_is_measured_once_and_then_remembered():
    assert stored_profile("host") is None
    first = cluster("host:8")
    assert stored_profile("host") is not None
    assert cluster("host:8") == first


def test_this_machine_is_not_measured_against_the_callers_wish():
    cluster("host:2", measure=False)
    assert stored_profile("host") is None


def test_host_devices_share_the_machine():
    group = cluster("host:4", measure=False).host_groups[0]
    assert group.shared_compute and group.devices_per_host == 4
    alone = cluster("host:1", measure=False).host_groups[0]
    assert group.device == alone.device
    assert group.intra_host.bandwidth == pytest.approx(alone.intra_host.bandwidth / 4)


def test_the_quick_measurement_is_plausible():
    device = quick_host_profile().device
    assert 1e8 < device.peak_flops["float32"] < 1e14
    assert 1e8 < device.memory_bandwidth < 1e13


def test_hosts_and_devices_of_each_may_be_named():
    assert cluster("h100:8x8").num_devices == 64
    (group,) = cluster("h100:4x2").host_groups
    assert (group.num_hosts, group.devices_per_host) == (4, 2)
    assert cluster("host:1x4").num_devices == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100:2x9", "a host of h100 has 8 devices, not 9; ask for h100:2x8"),
        ("h100:0x8", "hosts x devices such as 2x8"),
        ("h100:x8", "hosts x devices such as 2x8"),
        ("host:2x4", "this machine is one host"),
    ],
)
def test_hosts_that_do_not_exist_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        cluster(name)
