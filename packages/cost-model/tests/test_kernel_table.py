from cost_model import cluster
from cost_model.catalogue import DEVICES
from cost_model.host import default_host_profile
from cost_model.kernel_table import device_efficiency, kernel_table


def test_devices_with_measured_operators_use_them():
    (fit,) = kernel_table().fits
    assert device_efficiency(DEVICES["v100-16gb"]) == fit.efficiency
    assert fit.by_kind["matmul"] < 0.05  # on a model that was not fitted on


def test_other_gpus_take_the_shares_of_fitted_training_runs():
    efficiency = device_efficiency(DEVICES["h100"])
    assert efficiency == device_efficiency(DEVICES["a100-80gb"])
    assert 0.6 < efficiency.compute["matmul"] < 0.95
    assert "A100" in efficiency.source


def test_hosts_take_their_profile():
    device = cluster("host:2", measure=False).host_groups[0].device
    assert device_efficiency(device) == default_host_profile().efficiency
