import pytest

from alpa_interchange.document import DocumentError
from cost_model import cluster, store_profile, stored_profile
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
