"""Where arrays are born and live: nothing large is whole on one device, old state is freed."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa

WIDE, BATCH = 64, 8
OPTIMIZER = optax.adam(1e-3)


def _make_state(key):
    first, second = jax.random.split(key)
    params = {
        "up": jax.random.normal(first, (WIDE, 4 * WIDE)) / 8,
        "down": jax.random.normal(second, (4 * WIDE, WIDE)) / 16,
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def _step(state, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["x"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, {"loss": value}


BATCHES = {"x": jnp.ones((BATCH, WIDE))}
SHARDED: dict[str, Any] = {
    "num_stages": 1,
    "mesh_shape": (4,),
    "cluster": "host:4",
    "pins": {
        "state['params']['up']": (None, "x"),
        "state['params']['down']": ("x", None),
        "state['optimizer'][0].mu['up']": (None, "x"),
    },
}


@pytest.fixture(scope="module")
def sharded():
    """Return (step, state) of parameters pinned to a quarter per device, born by the plan."""
    step = alpa.parallelize(_step, **SHARDED)
    return step, step.init(_make_state, jax.random.key(0), batch=BATCHES)


def test_a_pinned_state_is_born_in_parts_with_the_values_of_the_plain_one(sharded, close):
    _, state = sharded
    up = state["params"]["up"]
    assert {shard.data.shape for shard in up.addressable_shards} == {(WIDE, WIDE)}
    down = state["params"]["down"]
    assert {shard.data.shape for shard in down.addressable_shards} == {(WIDE, WIDE)}
    assert state["optimizer"][0].mu["up"].sharding.spec[1] == "x"
    close(state, jax.jit(_make_state)(jax.random.key(0)))


def test_no_computation_of_the_birth_holds_a_whole_large_array(sharded):
    step, _ = sharded
    up = step.executable.input_sharding("state['params']['up']")
    text = (
        jax.jit(lambda key: _make_state(key)["params"]["up"], out_shardings=up)
        .lower(jax.random.key(0))
        .compile()
        .as_text()
    )
    assert text and f"f32[{WIDE},{4 * WIDE}]" not in text


def test_without_the_batch_the_first_step_gives_birth(sharded):
    step, _ = sharded
    unborn = alpa.parallelize(_step, **SHARDED)
    state = unborn.init(_make_state, jax.random.key(0))
    state, metrics = unborn(state, BATCHES)
    assert {shard.data.shape for shard in state["params"]["up"].addressable_shards} == {
        (WIDE, WIDE)
    }
    assert np.isfinite(metrics["loss"])


def test_each_stage_of_a_pipeline_holds_only_its_own_parameters():
    step = alpa.parallelize(_step, num_stages=2, max_mesh_axes=1, cluster="host:4")
    state = step.init(_make_state, jax.random.key(0), batch=BATCHES)
    first, second = (state["params"][name].sharding.device_set for name in ("up", "down"))
    assert not first & second


def test_old_state_is_freed_and_memory_does_not_grow(sharded):
    step, _ = sharded
    state = step.init(_make_state, jax.random.key(1))
    old = state["params"]["up"]
    state, _ = step(state, BATCHES)
    jax.block_until_ready(state)
    assert old.is_deleted()
    held = []
    for _ in range(4):
        state, metrics = step(state, BATCHES)
        jax.block_until_ready(state)
        gc.collect()
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    assert held[1:] == held[1:2] * 3
    assert np.isfinite(metrics["loss"])


def test_without_donation_old_state_stays():
    step = alpa.parallelize(_step, num_stages=1, max_mesh_axes=1, cluster="host:2", donate=False)
    state = step.init(_make_state, jax.random.key(1), batch=BATCHES)
    first, _ = step(state, BATCHES)
    second, _ = step(state, BATCHES)
    assert np.array_equal(first["params"]["up"], second["params"]["up"])


def test_a_host_state_is_placed_as_the_plan_wants(sharded, close):
    step, _ = sharded
    host = jax.tree.map(np.asarray, jax.jit(_make_state)(jax.random.key(2)))
    placed = step.place(host)
    assert {shard.data.shape for shard in placed["params"]["up"].addressable_shards} == {
        (WIDE, WIDE)
    }
    close(step(placed, BATCHES), jax.jit(_step)(host, BATCHES))
    close(step(host, BATCHES), jax.jit(_step)(host, BATCHES))


def test_a_state_given_to_an_earlier_step_is_refused(sharded):
    step, _ = sharded
    state = step.init(_make_state, jax.random.key(3))
    step(state, BATCHES)
    with pytest.raises(alpa.PlanError, match=r"was given away to an earlier step.*donate=False"):
        step(state, BATCHES)


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 1])
def test_one_array_at_two_places_of_the_state_and_old_parameters_returned(agrees, num_stages):
    def step(state, batch):
        trained, metrics = _step({name: state[name] for name in ("params", "optimizer")}, batch)
        ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["ema"], trained["params"])
        return {**trained, "ema": ema, "previous": state["params"]}, metrics

    state = _make_state(jax.random.key(4))
    state = {**state, "ema": state["params"], "previous": state["params"]}
    batches = [BATCHES, {"x": BATCHES["x"] / 2}, BATCHES]
    agrees(step, state, batches, num_stages=num_stages, max_mesh_axes=1, cluster="host:4")
