import math
import timeit

import numpy as np
import pytest
from attrs import evolve

from alpa_interchange.mesh import SubmeshSpec
from cost_model import CostModel, calibrate, calibrated_model, cluster, store_profile
from cost_model.cluster_file import parse_cluster
from cost_model.host import default_host_profile
from cost_model.layer_prediction import layer_seconds

H100 = CostModel(cluster("h100:16"))
HALF = SubmeshSpec(num_hosts=1, devices_per_host=4)
HOST = SubmeshSpec(num_hosts=1, devices_per_host=8)


def test_neighbours_on_one_host_use_its_links_side_by_side():
    seconds = H100.transfer_seconds(1e9, HALF, HALF)
    assert seconds == pytest.approx(1e9 / (4 * 450e9 * 0.8), rel=0.01)


def test_hosts_send_through_their_interfaces():
    assert H100.transfer_seconds(1e9, HOST, HOST) == pytest.approx(1e9 / (8 * 42.5e9), rel=0.01)
    # half of the devices reach half of the rails
    assert H100.transfer_seconds(1e9, HOST, HALF) == pytest.approx(1e9 / (4 * 42.5e9), rel=0.01)


def test_groups_send_over_the_link_between_them():
    spec = parse_cluster(
        {
            "host_groups": [{"preset": "h100"}, {"preset": "a100-40gb"}],
            "inter_group": {"name": "thin", "bandwidth": 1e9, "latency": 1e-3},
        }
    )
    other = SubmeshSpec(num_hosts=1, devices_per_host=8, host_group=1)
    seconds = CostModel(spec).transfer_seconds(1e9, HOST, other)
    assert seconds == pytest.approx(1e-3 + 1e9 / (8 * 1e9))


def test_nothing_moves_in_no_time():
    assert H100.transfer_seconds(0.0, HOST, HOST) == 0.0
    assert H100.transfer_seconds(np.array([0.0, 1e9]), HOST, HOST) == pytest.approx(
        [0.0, H100.transfer_seconds(1e9, HOST, HOST)]
    )


def test_a_matmul_is_faster_on_newer_devices_and_slower_in_wider_types():
    def time(name, dtype):
        return CostModel(cluster(name)).compute_seconds(1e13, 1e8, dtype)

    assert time("h100", "bfloat16") < time("a100-80gb", "bfloat16") < time("v100-32gb", "float16")
    assert time("h100", "float8_e4m3fn") < time("h100", "bfloat16") < time("h100", "float32")


def test_h100_matmuls_stay_below_what_its_clock_holds():
    seconds = H100.compute_seconds(2.0 * 8192**3, 4e8, "bfloat16", shape=(8192, 8192, 8192))
    assert 500e12 < 2.0 * 8192**3 / seconds < 750e12


def test_a_profile_replaces_the_catalogue():
    slow = default_host_profile()
    spec = cluster("host:2", measure=False)
    flops = slow.device.peak_flops["float32"]
    expected = 2 * 1.0 / 0.9 + slow.device.launch_latency
    assert CostModel(spec).compute_seconds(flops, 0.0, "float32") == pytest.approx(expected)


def test_a_stored_profile_of_the_device_is_used_by_the_calibrated_model():

    spec = cluster("l4")
    device = spec.host_groups[0].device
    halved = evolve(
        device, peak_flops={k: v / 2 for k, v in device.peak_flops.items()}, launch_latency=0.0
    )
    profile = evolve(
        default_host_profile(),
        name="l4",
        device=halved,
        devices_per_host=8,
        shared_compute=False,
    )
    assert calibrated_model(spec).profile is None
    store_profile(profile)
    model = calibrated_model(spec)
    assert model.device() == halved
    assert model.cluster.host_groups[0].intra_host == profile.intra_host


def test_calls_are_cheap_enough_for_a_planner():
    for call in (
        lambda: H100.compute_seconds(1e9, 1e6, "bfloat16"),
        lambda: H100.transfer_seconds(1e6, HOST, HALF),
    ):
        assert min(timeit.repeat(call, number=1000, repeat=3)) / 1000 < 20e-6


def test_intervals_are_wider_where_nothing_was_measured():
    def ratio(model):
        low, high = model.interval(2.0)
        assert low < 2.0 < high
        return high / low

    assert ratio(CostModel(cluster("a100-80gb:8"))) < ratio(CostModel(cluster("tpu-v4:4")))


def test_a_calibrated_interval_is_as_wide_as_its_layers_are_off(made_up_machine):
    profile = calibrate(made_up_machine("cpu", "cpu"))
    exact = evolve(
        profile,
        samples=tuple(
            evolve(sample, seconds=layer_seconds(profile, sample))
            for sample in profile.samples
            if sample.name.startswith("layer")
        ),
    )
    store_profile(exact)
    low, high = CostModel(cluster("host:4")).interval(1.0)
    assert high == pytest.approx(math.exp(1.2816 * 0.05))
    off = tuple(evolve(sample, seconds=1.5 * sample.seconds) for sample in exact.samples)
    store_profile(evolve(exact, samples=off))
    low, high = CostModel(cluster("host:4")).interval(1.0)
    assert high == pytest.approx(1.5**1.2816) and low == pytest.approx(1 / high)


def test_steps_that_differ_by_less_than_the_model_is_off_cannot_be_told_apart():
    one_host = CostModel(cluster("a100-80gb:8"))
    assert one_host.distinguishes(1.0, 1.05) and one_host.distinguishes(1.05, 1.0)
    assert not one_host.distinguishes(1.0, 1.02)
    assert not H100.distinguishes(1.0, 1.05) and H100.distinguishes(1.0, 1.5)
    # nothing was measured on it
    assert not CostModel(cluster("l4:8")).distinguishes(1.0, 1.05)
