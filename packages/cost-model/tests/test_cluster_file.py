import pytest

from cost_model import cluster
from cost_model.cluster_file import parse_cluster, read_cluster

MIXED = """
name = "mixed"
inter_group = "ethernet-100"

[[host_groups]]
preset = "h100"
num_hosts = 2

[[host_groups]]
num_hosts = 1
devices_per_host = 4
num_nics = 2
rail = true
device = {preset = "a100-40gb", memory = 30e9}
intra_host = {name = "bridge", bandwidth = 1e11, latency = 3e-6, efficiency = 0.7}
inter_host = "infiniband-200"

[[group_links]]
first = 0
second = 1
link = {name = "own", bandwidth = 5e9, latency = 1e-4}
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_host_groups_of_different_devices_are_read(tmp_path):
    spec = read_cluster(write(tmp_path, MIXED))
    first, second = spec.host_groups
    assert (spec.name, spec.num_devices) == ("mixed", 20)
    assert first.device.name == "h100" and first.num_hosts == 2 and first.rail
    assert second.device.memory == 30e9 and second.device.peak_flops["bfloat16"] == 312e12
    assert second.intra_host.effective_bandwidth == pytest.approx(7e10)
    assert spec.link_between(0, 1).name == "own"


def test_a_path_that_ends_in_toml_is_read_by_name(tmp_path):
    assert cluster(write(tmp_path, MIXED)).name == "mixed"


def test_a_cluster_without_a_name_takes_the_file_name(tmp_path):
    assert read_cluster(write(tmp_path, '[[host_groups]]\npreset = "l4"\n')).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host_groups = 3", "needs at least one"),
        ("name = 'x'", "needs at least one"),
        ("= 3", "is not valid TOML"),
        ("colour = 1\n[[host_groups]]\npreset = 'l4'", "unknown key 'colour'"),
        (
            "[[host_groups]]\npreset = 'l5'",
            r"host_groups\[0\].preset: 'l5' is not in the catalogue",
        ),
        ("[[host_groups]]\npreset = 'l4'\nhosts = 2", "unknown key 'hosts'"),
        ("[[host_groups]]\npreset = 'l4'\nnum_hosts = 0", "num_hosts must be above 0"),
        ("[[host_groups]]\nnum_hosts = 2", "needs device, devices_per_host, intra_host"),
        ("[[host_groups]]\npreset = 'l4'\ndevice = 7", "must be a catalogue name or a table"),
        ("[[host_groups]]\npreset = 'l4'\nintra_host = {name = 'x'}", "needs bandwidth, latency"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_cluster(write(tmp_path, text))
    assert "mine.toml" in str(caught.value)


def test_parsed_data_is_read_without_a_file():
    spec = parse_cluster({"host_groups": [{"preset": "tpu-v4", "num_hosts": 4}]})
    assert spec.num_devices == 16
