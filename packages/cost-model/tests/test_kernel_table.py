import pytest

from cost_model import CostModel, cluster
from cost_model.catalogue import DEVICES
from cost_model.host import default_host_profile
from cost_model.kernel import DATA_SHEET, UNMEASURED
from cost_model.kernel_table import device_efficiency, kernel_table


def test_devices_with_measured_operators_use_them():
    fits = {fit.device: fit for fit in kernel_table().fits}
    assert {"a100-40gb", "b200", "gh200", "v100-16gb", "v100-32gb"} <= set(fits)
    for name, fit in fits.items():
        assert device_efficiency(DEVICES[name]) == fit.efficiency
        assert "measured operators" in fit.efficiency.source
    # on models that were not fitted on
    assert fits["v100-32gb"].median_error["matmul"] < 0.1


@pytest.mark.parametrize(("name", "like"), [("h100", "gh200"), ("gb300", "b200")])
def test_the_same_chip_takes_the_measured_shares_with_a_wider_error(name, like):
    efficiency, measured = device_efficiency(DEVICES[name]), device_efficiency(DEVICES[like])
    assert efficiency.compute == measured.compute
    assert efficiency.error("matmul") > measured.error("matmul")
    assert f"of {like}, the same chip" in efficiency.source


def test_devices_without_measured_operators_say_so_and_are_least_certain_of_matmuls():
    model = CostModel(cluster("l4:4"))
    assert model.based_on().startswith(DATA_SHEET)
    assert device_efficiency(DEVICES["l4"]).error("matmul") == UNMEASURED
    assert device_efficiency(DEVICES["b200"]).error("matmul") < UNMEASURED


def test_the_error_of_default_shares_is_that_of_the_measured_devices():
    found = [error for fit in kernel_table().fits for error in fit.default_error.values()]
    assert sum(found) / len(found) == pytest.approx(UNMEASURED, abs=0.05)


def test_hosts_take_their_profile():
    device = cluster("host:2", measure=False).host_groups[0].device
    assert device_efficiency(device) == default_host_profile().efficiency
