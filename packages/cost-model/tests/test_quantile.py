import math

import pytest

from alpa_interchange.mesh import SubmeshSpec
from cost_model import CostModel, at_quantile, calibrated_model, cluster, store_profile
from cost_model.host import default_host_profile
from cost_model.kernel_table import device_efficiency

H100 = cluster("h100:16")
HOST = SubmeshSpec(num_hosts=1, devices_per_host=8)


def test_half_is_the_cluster_itself():
    same = at_quantile(H100, 0.5)
    assert (same.host_groups, same.name) == (H100.host_groups, "h100:16@50%")


def test_nine_times_out_of_ten_kernels_are_within_their_error():
    slow = CostModel(cluster("h100:16@90%"))
    error = device_efficiency(H100.host_groups[0].device).error("matmul")
    ratio = slow.compute_seconds(1e14, 0.0, "bfloat16") / CostModel(H100).compute_seconds(
        1e14, 0.0, "bfloat16"
    )
    assert ratio == pytest.approx(math.exp(1.2816 * error), rel=1e-3)


def test_the_network_is_less_certain_than_links_that_were_measured():
    def ratio(name, target):
        costs = [CostModel(cluster(f"{name}{mark}")) for mark in ("", "@90%")]
        half = SubmeshSpec(num_hosts=1, devices_per_host=4)
        source = half if target == half else HOST
        mean, slow = (model.transfer_seconds(1e9, source, target) for model in costs)
        return slow / mean

    inside = ratio("a100-80gb:16", SubmeshSpec(num_hosts=1, devices_per_host=4))
    assert 1.0 < inside < 1.1 < 1.8 < ratio("a100-80gb:16", HOST)


def test_a_stored_profile_counts_before_the_quantile():
    profile = default_host_profile()
    store_profile(profile)
    spec = cluster("host:2@90%", measure=False)
    flops = profile.device.peak_flops["float32"]
    assert calibrated_model(spec).device().peak_flops["float32"] < flops / 2


@pytest.mark.parametrize("quantile", [0.0, 1.0, 90.0])
def test_quantiles_are_probabilities(quantile):
    with pytest.raises(ValueError, match=r"quantile must be from 0.01 to 0.99"):
        at_quantile(H100, quantile)


def test_a_quantile_of_a_quantile_is_refused():
    with pytest.raises(ValueError, match=r"'h100:16@90%' is at a quantile already"):
        at_quantile(cluster("h100:16@90%"), 0.9)
