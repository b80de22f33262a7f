import pytest

from cost_model.catalogue import DEVICES, HOSTS, LINKS


def test_the_catalogue_has_the_hardware_it_promises():
    devices = {
        "v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "h800", "l4",
        "rtx-titan",
        "b300", "gb200", "gb300", "gh200",
        "rtx-3090", "rtx-2080ti", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p",
    }  # fmt: skip
    assert devices == set(DEVICES)
    assert {"p3.16xlarge", "dgx-1", "dgx-2", "p4d.24xlarge", "selene", "p5.48xlarge"} <= set(HOSTS)
    assert devices <= {group.device.name for group in HOSTS.values()} | set(HOSTS)


def test_every_constant_names_its_source():
    for device in DEVICES.values():
        assert device.source, device.name
    for link in LINKS.values():
        assert link.source, link.name


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_devices_have_physical_peaks(device):
    assert 1e10 <= device.memory <= 300e9
    assert 1e11 <= device.memory_bandwidth <= 1e13
    assert device.peak_flops["float32"] <= device.peak_flops["float16"]
    assert device.peak_flops["float64"] <= device.peak_flops["float32"]


def test_known_figures_of_data_sheets():
    assert DEVICES["a100-80gb"].peak_flops["bfloat16"] == 312e12
    assert DEVICES["h100"].memory_bandwidth == 3350e9
    assert LINKS["nvlink4"].bandwidth == 450e9
    # an H800 is an H100 with less NVLink
    assert DEVICES["h800"].peak_flops["bfloat16"] == DEVICES["h100"].peak_flops["bfloat16"]
    assert LINKS["nvlink-h800"].bandwidth < LINKS["nvlink4"].bandwidth


def test_links_inside_a_host_are_not_slower_than_one_interface():
    for name, group in HOSTS.items():
        assert group.intra_host.bandwidth >= group.inter_host.bandwidth, name
