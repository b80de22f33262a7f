from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_meta as alpa
import stage_dp
from alpa_meta.execution import meshes
from alpa_meta.execution.meshes import move
from resharding.jax_executor import reshard


@pytest.fixture
def gathers(monkeypatch):
    """Return a list that grows whenever an array is fetched into host memory."""
    found: list[tuple[int, ...]] = []
    kind: Any = type(jnp.zeros(1))
    fetch = kind._value

    def counted(array):
        found.append(array.shape)
        return fetch.fget(array)

    monkeypatch.setattr(kind, "_value", property(counted))
    return found


def make(key):
    return {f"w{k}": jax.random.normal(key, (64, 64)) / 8 for k in range(4)}


def step(weights, x):
    def loss_of(weights):
        h = x
        for k in range(4):
            h = jnp.tanh(h @ weights[f"w{k}"])
        return jnp.mean((h - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), loss


def test_layouts_change_between_stages_without_the_memory_of_the_host(monkeypatch, gathers):
    changed = []

    def noted(array, sharding, **options):
        if array.sharding.shard_shape(array.shape) != sharding.shard_shape(array.shape):
            changed.append(array.shape)
        return reshard(array, sharding, **options)

    monkeypatch.setattr(meshes, "reshard", noted)
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    planned = alpa.parallelize(step, cluster="host:8", num_stages=2, num_microbatches=2)
    state = planned.init(make, jax.random.key(0), batch=x)
    planned(planned.init(make, jax.random.key(0), batch=x), x)  # compiles
    changed.clear()
    gathers.clear()
    state, loss = planned(state, x)
    assert not gathers
    assert changed  # between the stages of this plan, in both directions
    _, expected = jax.jit(step)(make(jax.random.key(0)), x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_random_keys_move_as_well():
    cut = [Mesh(np.array(jax.devices()[k : k + 2]), ("x",)) for k in (0, 2)]
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), NamedSharding(cut[0], P("x")))
    moved = move(keys, NamedSharding(cut[1], P()))
    assert moved.sharding.device_set == set(cut[1].devices.flat)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


@pytest.fixture
def may_take(monkeypatch):
    """Return a function that says how many bytes jax may take of each device here."""

    def say(limit):
        stats = None if limit is None else {"bytes_limit": limit}
        kind = type(jax.devices()[0])
        monkeypatch.setattr(kind, "memory_stats", lambda self: stats)

    return say


def planned_and_needed():
    planned = alpa.parallelize(step, cluster="host:8", num_stages=2)
    x = jax.ShapeDtypeStruct((32, 64), np.float32)
    plan = planned.plan_for(jax.eval_shape(make, jax.random.key(0)), x)
    return planned, max(stage_dp.device_bytes(plan.stage_plan))


def test_a_plan_for_more_memory_than_jax_may_take_is_said_where_it_is_bound(may_take):
    planned, needed = planned_and_needed()
    may_take(needed - 1)
    with pytest.warns(RuntimeWarning, match="XLA_PYTHON_CLIENT_MEM_FRACTION.*--memory") as said:
        planned.executable  # noqa: B018
    assert f"memory={needed - 1:.0f}" in str(said[0].message)


@pytest.mark.sample(more=1)
@pytest.mark.parametrize("more", [None, 0])
def test_a_plan_that_fits_or_devices_that_do_not_say_are_taken_silently(may_take, more, recwarn):
    planned, needed = planned_and_needed()
    may_take(None if more is None else needed + more)
    planned.executable  # noqa: B018
    assert not [one for one in recwarn if "memory" in str(one.message)]
