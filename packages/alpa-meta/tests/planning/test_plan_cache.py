"""Plans of earlier searches."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve

import alpa_meta as alpa
from alpa_interchange import ShardingRule
from alpa_meta.options import Options
from alpa_meta.planning.plan_cache import plan_key
from alpa_meta.planning.planner import make_plan
from alpa_meta.step.program import Step
from cost_model import cluster

WEIGHTS = {"up": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)
CLUSTER = cluster("h100:2")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Keep plans in a folder of the test's own; return it."""
    monkeypatch.setenv("ALPA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ALPA_PLAN_CACHE")
    return tmp_path / "plans"


def step_of(rate=0.1, bias=0.0):
    def step(weights, batch):
        def loss(weights):
            return jnp.mean((batch @ weights["up"] + np.full(16, bias, np.float32)) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), value

    return step


def planned(step=None, on=CLUSTER, **options):
    wanted = Options(num_microbatches=1, **options)  # fewer searches
    return make_plan(Step(step or step_of(), (WEIGHTS, BATCH)), on, wanted)


def key(step=None, on=CLUSTER, **options):
    wanted = Options(num_microbatches=1, **options)
    return plan_key(Step(step or step_of(), (WEIGHTS, BATCH)), on, wanted)


def test_the_second_search_is_answered_with_the_first_plan(folder):
    first, second = planned(), planned()
    assert (first.cached, second.cached) == (False, True)
    assert second.plan == first.plan
    assert len(list(folder.iterdir())) == 1


def test_a_step_says_that_its_plan_was_found_and_shows_it_as_progress():
    seen = []
    for expected in (False, True):
        step = alpa.parallelize(
            step_of(), cluster=CLUSTER, progress=lambda stage, *_: seen.append(stage)
        )
        assert step.lower(WEIGHTS, BATCH).from_cache is expected
        assert step.plan_from_cache is expected
    assert seen[-1] == "cache" and "plan" in seen


def test_options_and_the_environment_switch_it_off(monkeypatch, folder):
    assert not planned(cache=False).cached
    assert not folder.exists()
    planned()
    assert not planned(cache=False).cached
    monkeypatch.setenv("ALPA_PLAN_CACHE", "0")
    assert not planned().cached


@pytest.mark.parametrize(
    "change",
    [
        {"step": step_of(rate=0.2)},
        {"step": step_of(bias=1.0)},
        {"on": cluster("h100:4")},
        {"on": evolve(CLUSTER, name="other")},
        {"num_stages": 1},
        {"memory": 1e9},
        {"pins": {"weights['up']": ("x", None)}},
        {"seed": 1},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_a_search_depends_on_is_in_the_key(change):
    assert key(**change) != key()


@pytest.mark.parametrize(
    "same",
    [{"donate": False}, {"trace": "ready"}, {"progress": lambda *_: None}, {"dynamic_dims": 0}],
    ids=lambda same: "-".join(same),
)
def test_what_only_running_depends_on_is_not(same):
    assert key(**same) == key()


def test_a_profile_of_the_machine_is_in_the_key(folder):
    before = key()
    (folder.parent / "profiles").mkdir()
    (folder.parent / "profiles" / "h100.json").write_text("{}")
    assert key() != before


def test_a_rule_that_the_user_registers_is_in_the_key():
    doubled = jax.extend.core.Primitive("doubled_for_the_key")
    doubled.def_abstract_eval(lambda x: x)

    def step(weights, batch):
        return {"up": weights["up"] + doubled.bind(batch).sum()}, batch.sum()

    def whole(eqn):
        return ShardingRule.parse("1 1 -> 1 1", {})

    def by_rows(eqn):
        return ShardingRule.parse("b 1 -> b 1", {"b": 16})

    keys = [key(step)]
    for rule in (whole, by_rows):
        alpa.sharding_rule("doubled_for_the_key", rule)
        keys.append(key(step))
    assert len(set(keys)) == 3


def test_the_precision_of_products_is_in_the_key():
    before = key()
    with jax.default_matmul_precision("highest"):
        assert key() != before


@pytest.mark.sample(damage=2)
@pytest.mark.parametrize("damage", [b"", b"[" * 10**5, b"{", b"\xff"])
def test_a_damaged_plan_is_searched_again_and_replaced_with_a_warning(folder, damage):
    first = planned()
    (path,) = folder.iterdir()
    path.write_bytes(damage)
    with pytest.warns(UserWarning, match="cannot be used, so that the step is planned anew"):
        again = planned()
    assert not again.cached and again.plan.step_seconds == first.plan.step_seconds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned().cached


def test_a_plan_of_another_program_under_the_key_is_not_taken(folder):
    planned(step_of())
    (path,) = folder.iterdir()

    def other(weights, batch):
        value, gradients = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(batch @ w["up"])))(weights)
        return jax.tree.map(jnp.subtract, weights, gradients), value

    path.rename(folder / f"{key(other)}.json")
    with pytest.warns(UserWarning, match="the plan was made for another program"):
        assert not planned(other).cached


def test_a_folder_that_cannot_be_written_only_keeps_nothing(folder, caplog):
    folder.write_text("a file in its place")
    assert not planned().cached
    assert "the plan cannot be kept" in caplog.text


def test_a_found_plan_runs_as_the_searched_one():
    state = {"up": jnp.linspace(-1.0, 1.0, 128).reshape(8, 16)}
    batch = jnp.ones((16, 8))
    results = [
        alpa.parallelize(step_of(), cluster="host:2", donate=False)(state, batch) for _ in range(2)
    ]
    for one, two in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(one, two)
