"""Batches whose examples lie along another dim than the first, against one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa

T, B, D, H = 6, 16, 8, 16
OPTIMIZER = optax.sgd(0.1)
KEYS = jax.random.split(jax.random.key(0), 8)


def _state():
    shapes = {"in": (D, H), "again": (H, H), "out": (H, 1)}
    params = {
        name: jax.random.normal(key, shape) / 4
        for (name, shape), key in zip(shapes.items(), KEYS, strict=False)
    }
    return params, OPTIMIZER.init(params)


def _unrolled(params, batch):
    """Return what a recurrent network makes of each moment, [T, B, H]."""

    def moment(hidden, x):
        hidden = jnp.tanh(x @ params["in"] + hidden @ params["again"])
        return hidden, hidden

    first = batch.get("first", jnp.zeros((batch["x"].shape[1], H)))
    return jax.lax.scan(moment, first, batch["x"])[1]


def _value_loss(params, batch):
    """Return the loss of a critic of discounted rewards, as of an actor that stores [T, B]."""
    values = (jnp.tanh(_unrolled(params, batch)) @ params["out"])[..., 0]

    def back(later, now):
        reward, goes_on = now
        later = reward + 0.9 * goes_on * later
        return later, later

    rewards = batch["reward"], batch["goes_on"]
    _, returns = jax.lax.scan(back, jax.lax.stop_gradient(values[-1]), rewards, reverse=True)
    errors = returns - values
    return jnp.mean(errors**2), errors


def _step(state, batch):
    params, moments = state
    (value, errors), gradients = jax.value_and_grad(_value_loss, has_aux=True)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": value, "errors": errors}


def _batch(steps=T, examples=B, first=True, seed=0):
    random = np.random.default_rng(seed)
    batch = {
        "x": random.normal(size=(steps, examples, D)).astype(np.float32),
        "reward": random.normal(size=(steps, examples)).astype(np.float32),
        "goes_on": (random.random((steps, examples)) < 0.9).astype(np.float32),
    }
    if first:
        batch["first"] = random.normal(size=(examples, H)).astype(np.float32)
    return batch


@pytest.mark.sample("first", "stages")
@pytest.mark.parametrize("first", [True, False], ids=["first states [B, H]", "all [T, B]"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_time_major_batch_is_cut_along_its_examples(agrees, first, stages):
    batches = [_batch(first=first, seed=k) for k in range(2)]
    batches[1] = jax.tree.map(jnp.asarray, batches[1])  # of the host, and of a device
    parallel = agrees(
        _step, _state(), batches, cluster="host:4", num_stages=stages, num_microbatches=4
    )
    assert parallel.plan.num_microbatches == 4
    shapes = {item.path: item.shape for item in parallel.plan.program.inputs}
    assert shapes["batch['x']"] == (B, T, D)


def test_as_many_moments_as_examples(agrees):
    batch = _batch(steps=8, examples=8)
    agrees(_step, _state(), [batch], cluster="host:2", num_stages=1, num_microbatches=2)


def test_arguments_of_their_own(agrees):
    def step(state, x, first, labels):
        def loss(params):
            values = (_unrolled(params, {"x": x, "first": first}) @ params["out"])[..., 0]
            return jnp.mean((values - labels) ** 2)

        value, gradients = jax.value_and_grad(loss)(state[0])
        updates, moments = OPTIMIZER.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    given = _batch()
    batch = given["x"], given["first"], given["reward"]
    state = _state()
    parallel = alpa.parallelize(step, cluster="host:4", num_stages=1, num_microbatches=4)
    expected = jax.jit(step)(state, *batch)
    found = parallel(state, *batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def test_what_the_planner_chooses_is_a_pipeline_of_examples(agrees):
    parallel = agrees(_step, _state(), [_batch()], cluster="host:2", num_stages=2)
    assert parallel.plan.num_microbatches > 1


def test_a_plan_runs_again_and_random_plans_do(agrees):
    given: dict[str, Any] = {"cluster": "host:4", "num_stages": 2, "num_microbatches": 2}
    plan = alpa.parallelize(_step, **given).plan_for(_state(), _batch())
    agrees(_step, _state(), [_batch()], plan=plan)
    random = alpa.parallelize(_step, **given).random_plan(_state(), _batch(), seed=1)
    agrees(_step, _state(), [_batch()], plan=random)
    square = _batch(steps=8, examples=8)  # whose shapes do not tell
    plan = alpa.parallelize(_step, **given).plan_for(_state(), square)
    agrees(_step, _state(), [square], plan=plan)


def test_dims_of_options_are_those_of_the_batch_that_is_given(agrees):
    batches = [_batch(steps=steps, first=False) for steps in (6, 4, 6)]
    parallel = agrees(
        _step,
        _state(),
        batches,
        cluster="host:2",
        num_stages=1,
        num_microbatches=2,
        mesh_shape=(2,),
        dynamic_dims=0,
        pins={"batch['x']": (None, "x")},
    )
    assert [bucket.taken_over for bucket in parallel.buckets] == [False, True]
    (sharding,) = parallel.plan.shardings
    assert sharding.state_specs is not None
    executable = parallel.lower(_state(), batches[0]).compile()
    assert executable.input_sharding("batch['x']").spec[0] == "x"


def test_evaluation_and_audit(agrees):
    parallel = alpa.parallelize(_step, cluster="host:2", num_stages=1, num_microbatches=2)
    state, batch = _state(), _batch()
    _, expected = jax.jit(_step)(state, batch)
    _, found = parallel.evaluate(state, batch)
    np.testing.assert_allclose(found["errors"], expected["errors"], rtol=1e-5, atol=1e-6)
    assert parallel.audit(state, batch).ok


def test_what_mixes_the_examples_is_refused_whatever_their_dim():
    def normalised(params, batch):
        hidden = batch["x"] @ params["in"]
        hidden = (hidden - hidden.mean((0, 1))) / jnp.sqrt(hidden.var((0, 1)) + 1e-5)
        return jnp.mean((jnp.tanh(hidden) @ params["out"]) ** 2)

    def step(state, batch):
        value, gradients = jax.value_and_grad(normalised)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    batch = {"x": _batch()["x"]}
    with pytest.raises(alpa.PlanError, match="2 microbatches would change the result"):
        alpa.parallelize(step, cluster="host:2", num_microbatches=2).plan_for(_state()[0], batch)


def test_batches_that_hosts_read_have_their_examples_first():
    def read(step, start, stop):
        return {"x": np.zeros((stop - start, B, D), np.float32)}

    def step(state, batch):
        def loss(params):
            return jnp.mean((_unrolled(params, batch) @ params["out"]) ** 2)

        return state[0], jax.value_and_grad(loss)(state[0])

    batches = alpa.HostBatches(read, {"x": jax.ShapeDtypeStruct((T, B, D), jnp.float32)})
    parallel = alpa.parallelize(step, cluster="host:2", num_stages=1, num_microbatches=2)
    with pytest.raises(alpa.PlanError, match="can be read along dim 0 only"):
        parallel(_state(), batches[0])
