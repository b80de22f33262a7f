"""The optimiser's arrays in the memory of the hosts: the same results, less memory planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import alpa_meta as alpa
from alpa_interchange import ParallelPlan, load, save

WIDTH, BATCH = 16, 32
OPTIMISER = optax.adam(1e-2)


def _step(state, batch):
    def loss(params):
        x = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMISER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def _state(width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (width, width)) / 4 for key in keys]
    return params, OPTIMISER.init(params)


BATCHES = jax.random.normal(jax.random.key(1), (3, BATCH, WIDTH))
WHOLE: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}
PARTS: dict[str, Any] = {"num_stages": 1, "num_microbatches": 2}
PIPELINE: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2}


@pytest.mark.sample(plan=2)
@pytest.mark.parametrize("plan", [PIPELINE, PARTS, WHOLE])
def test_moments_on_the_host_give_the_results_of_one_device(agrees, plan):
    step = agrees(_step, _state(), BATCHES, cluster="host:4", offload="moments", **plan)
    memory = {one.path: one.memory for one in step.plan.program.inputs}
    moved = [path for path, kind in memory.items() if kind == "pinned_host"]
    assert len(moved) == 8 and all("mu" in path or "nu" in path for path in moved)


def test_moments_stay_on_the_host_between_steps():
    step = alpa.parallelize(_step, cluster="host:4", offload="moments", cache=False, **PARTS)
    state = _state()
    for batch in BATCHES:
        state, _ = step(state, batch)
    kinds: dict[int, set[str]] = {leaf.ndim: set() for leaf in jax.tree.leaves(state[1])}
    for leaf in jax.tree.leaves(state[1]):
        kinds[leaf.ndim].add(leaf.sharding.memory_kind)
    assert kinds == {0: {"device"}, 2: {"pinned_host"}}
    assert {leaf.sharding.memory_kind for leaf in state[0]} == {"device"}


def test_a_saved_plan_says_what_is_on_the_host(tmp_path, agrees):
    step = alpa.parallelize(_step, cluster="host:4", offload="moments", cache=False, **PARTS)
    save(step.plan_for(_state(), BATCHES[0]), tmp_path / "plan.json")
    loaded = load(tmp_path / "plan.json", ParallelPlan)
    restored = agrees(_step, _state(), BATCHES, cluster="host:4", plan=loaded)
    assert restored.plan.program.inputs == step.plan.program.inputs


def test_state_takes_less_memory_for_the_time_of_the_transfers():
    shapes = jax.eval_shape(lambda: _state(1024)), jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    fixed: dict[str, Any] = {"cluster": "h100:2", "preset": "dp", "cache": False, **PARTS}
    plans = [
        alpa.parallelize(_step, offload=kind, **fixed).plan_for(*shapes)
        for kind in ("none", "moments")
    ]
    weights = 4 * 1024 * 1024 * 4.0
    (near,), (far,) = (plan.shardings for plan in plans)
    assert near.memory["state"] >= 3 * weights
    assert far.memory["state"] == pytest.approx(near.memory["state"] - 2 * weights)
    link = plans[1].cluster.host_groups[0].host_link
    assert link is not None
    transfers = 2 * (8 * link.latency + 2 * weights / link.effective_bandwidth)
    assert plans[1].step_seconds - plans[0].step_seconds == pytest.approx(transfers, rel=0.02)


def test_moments_on_the_host_make_room():
    shapes = jax.eval_shape(lambda: _state(1024)), jax.ShapeDtypeStruct((2**15, 1024), jnp.float32)
    fixed: dict[str, Any] = {"cluster": "h100:2", "preset": "dp", "cache": False, **WHOLE}
    fixed["mesh_shape"] = (2,)
    step = alpa.parallelize(_step, recompute="full", offload="moments", **fixed)
    memory = step.plan_for(*shapes).stage_plan.peak_bytes[0] + 1e6
    assert step.plan.shardings[0].memory["state"] == pytest.approx(4 * 1024 * 1024 * 4, rel=1e-3)
    with pytest.raises(alpa.InfeasibleError, match="offload='moments'"):
        told = {**fixed, "memory": memory, "recompute": "full", "offload": "none"}
        alpa.parallelize(_step, **told).plan_for(*shapes)
    chosen = alpa.parallelize(_step, memory=memory, recompute="full", **fixed).plan_for(*shapes)
    assert [one for one in chosen.program.inputs if one.memory == "pinned_host"]


def test_moments_stay_on_the_devices_where_any_plan_fits_so():
    shapes = jax.eval_shape(lambda: _state(1024)), jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    plan = alpa.parallelize(_step, cluster="h100:2", cache=False).plan_for(*shapes)
    assert {one.memory for one in plan.program.inputs} == {"device"}


def test_a_state_too_large_for_the_devices_has_its_moments_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("ALPA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ALPA_PLAN_CACHE")
    shapes = jax.eval_shape(lambda: _state(1024)), jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    weights = 4 * 1024 * 1024 * 4.0  # parameters and two moments: three times as much is the state
    small: dict[str, Any] = {"cluster": "h100:1", "memory": 2.7 * weights}
    plan = alpa.parallelize(_step, cache=False, **small).plan_for(*shapes)
    assert sum(one.memory == "pinned_host" for one in plan.program.inputs) == 8
    cached = alpa.parallelize(_step, **small)
    assert cached.plan_for(*shapes).program.inputs == plan.program.inputs
    again = alpa.parallelize(_step, **small)
    assert again.plan_for(*shapes).program.inputs == plan.program.inputs
    assert again.plan_from_cache
    with pytest.raises(alpa.InfeasibleError, match="the state alone takes"):
        alpa.parallelize(_step, offload="none", **small).plan_for(*shapes)


@pytest.mark.sample(plan=1)
@pytest.mark.parametrize("plan", [PIPELINE, WHOLE])
def test_programs_that_fetch_moments_are_their_plans(plan):
    step = alpa.parallelize(_step, cluster="host:4", offload="moments", cache=False, **plan)
    audit = step.audit(_state(), BATCHES[0])
    assert audit.ok and audit.numerics is not None and audit.numerics.ok


def test_offload_is_of_moments_or_of_nothing():
    with pytest.raises(
        alpa.PlanError, match=r"Options.offload must be one of moments, none, or None"
    ):
        alpa.parallelize(_step, offload="weights")
