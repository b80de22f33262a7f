"""The folder of kept plans."""

import os

import pytest
from two_matrices import BATCH, STATE, step

from alpa_interchange import DocumentError
from alpa_meta.options import Options
from alpa_meta.planning.plan_store import PlanStore, is_switched_off, plan_directory
from alpa_meta.planning.sampling import sample_plan
from alpa_meta.step.program import Step
from cost_model import cluster


@pytest.fixture(scope="module")
def plan():
    options = Options(num_microbatches=1, num_stages=1)
    return sample_plan(Step(step, (STATE, BATCH)), cluster("host:2"), options, 0).plan


def _age(store, key, seconds):
    """Make the plan of `key` look as if it was used so long ago."""
    path = store.folder / f"{key}.json"
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_a_plan_is_found_under_its_key_only(tmp_path, plan):
    store = PlanStore(tmp_path / "plans")
    assert store.load("one") is None
    store.save("one", plan)
    assert store.load("one") == plan
    assert store.load("two") is None


def test_the_least_recently_used_plans_are_dropped(tmp_path, plan):
    PlanStore(tmp_path).save("one", plan)
    (size,) = PlanStore(tmp_path).sizes()
    store = PlanStore(tmp_path, max_bytes=2 * size)
    store.save("two", plan)
    _age(store, "one", 100)
    _age(store, "two", 50)
    assert store.load("one") is not None  # used now
    store.save("three", plan)
    assert [key for key in ("one", "two", "three") if store.load(key)] == ["one", "three"]
    assert sum(store.sizes()) <= store.max_bytes


def test_what_was_left_half_written_is_dropped_like_plans(tmp_path, plan):
    (tmp_path / "tmp123").write_bytes(b"x" * 10**6)
    os.utime(tmp_path / "tmp123", (0, 0))
    PlanStore(tmp_path, max_bytes=10**6).save("one", plan)
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_damaged_plan_is_an_error(tmp_path, plan):
    store = PlanStore(tmp_path)
    store.save("one", plan)
    (tmp_path / "one.json").write_text("{")
    with pytest.raises(DocumentError, match="is not valid JSON"):
        store.load("one")


def test_clearing_leaves_nothing(tmp_path, plan):
    store = PlanStore(tmp_path)
    store.save("one", plan)
    store.clear()
    assert store.sizes() == []


def test_plans_are_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ALPA_CACHE_DIR", str(tmp_path / "own"))
    assert plan_directory() == tmp_path / "own" / "plans"
    monkeypatch.delenv("ALPA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_directory() == tmp_path / "alpa" / "plans"


@pytest.mark.parametrize(
    ("value", "off"), [("0", True), ("OFF", True), ("false", True), ("1", False), ("", False)]
)
def test_an_environment_variable_switches_it_off(monkeypatch, value, off):
    monkeypatch.setenv("ALPA_PLAN_CACHE", value)
    assert is_switched_off() is off
