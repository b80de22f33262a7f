import pytest

from alpa_interchange.document import DocumentError
from cost_model import calibrate, cluster, store_profile, stored_profile
from cost_model.host import default_host_profile
from cost_model.profile import apply_profile, profile_directory


def test_a_profile_that_was_never_stored_is_none():
    assert stored_profile("nowhere") is None


def test_profiles_go_where_they_are_sent(tmp_path):
    path = tmp_path / "elsewhere.json"
    assert store_profile(default_host_profile(), path) == path
    assert path.exists() and not profile_directory().exists()


def test_the_users_cache_is_used_without_a_wish(monkeypatch, tmp_path):
    monkeypatch.delenv("ALPA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_directory() == tmp_path / "alpa" / "profiles"


def test_a_damaged_profile_is_named():
    store_profile(default_host_profile())
    (profile_directory() / "host.json").write_text("{")
    with pytest.raises(DocumentError, match=r"host\.json: is not valid JSON"):
        stored_profile("host")


def test_only_groups_of_the_measured_device_change():
    spec = cluster("h100:8")
    assert apply_profile(spec, default_host_profile()) == spec


def test_a_profile_of_one_device_leaves_links_and_memory_of_a_cluster(made_up_machine):
    spec = cluster("h200:8")
    alone = calibrate(made_up_machine(kind="NVIDIA H200", devices=1))
    (before,), (after,) = spec.host_groups, apply_profile(spec, alone).host_groups
    assert (after.intra_host, after.device.memory) == (before.intra_host, before.device.memory)
    assert after.device.peak_flops != before.device.peak_flops
    several = calibrate(made_up_machine(kind="NVIDIA H200", devices=4))
    (measured,) = apply_profile(spec, several).host_groups
    assert measured.intra_host == several.intra_host
