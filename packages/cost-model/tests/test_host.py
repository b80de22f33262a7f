import pytest
from attrs import evolve

from cost_model import CostModel, cluster
from cost_model.host import default_host_profile, host_profile, quick_host_profile
from cost_model.profile import store_profile


def test_a_stored_profile_is_preferred_to_measuring():
    profile = default_host_profile()
    store_profile(profile)
    assert host_profile() == profile


def test_a_stored_quick_measurement_keeps_what_was_measured_and_nothing_assumed():
    fresh = quick_host_profile()
    link = evolve(fresh.intra_host, latency=1.0)
    store_profile(evolve(fresh, intra_host=link))
    assert host_profile() == fresh


def test_a_stored_calibration_is_taken_as_it_is():
    fresh = quick_host_profile()
    link = evolve(fresh.intra_host, latency=1.0)
    calibrated = evolve(fresh, driver="jax 0.10.2, cpu", intra_host=link)
    store_profile(calibrated)
    assert host_profile() == calibrated


def test_a_read_only_home_does_not_stop_anyone(monkeypatch):
    def refuse(profile):
        raise OSError("read-only")

    monkeypatch.setattr("cost_model.host.store_profile", refuse)
    assert host_profile().device.platform == "cpu"


def test_compute_on_n_host_devices_takes_as_long_as_all_of_it_on_one():
    whole = CostModel(cluster("host:1", measure=False))
    parts = CostModel(cluster("host:8", measure=False))
    launch = whole.device().launch_latency
    one = whole.compute_seconds(8e9, 0.0, "float32") - launch
    eight = parts.compute_seconds(1e9, 0.0, "float32") - launch
    assert eight == pytest.approx(one)
    assert parts.device().memory == pytest.approx(whole.device().memory / 8)
