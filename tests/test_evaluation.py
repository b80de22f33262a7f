"""Evaluating a step: its forward pass alone, on the devices and stages of its plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import alpa_meta as alpa

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def _loss(params, batch):
    x = batch
    for w in params:
        x = x + jnp.tanh(x @ w)
    each = jnp.mean(x**2, -1)
    return each.mean(), each


def _step(state, batch):
    params, moments = state
    (loss, each), gradients = jax.value_and_grad(_loss, has_aux=True)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    metrics = {
        "loss": loss,
        "each": each,
        "perplexity": jnp.exp(loss),
        "norm": sum(jnp.sum(g**2) for g in gradients),
    }
    return (optax.apply_updates(params, updates), moments), metrics


@pytest.fixture
def training():
    """Return a state of four layers and a batch."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = [0.3 * jax.random.normal(k, (8, 8)) for k in keys[:4]]
    return (params, OPTIMIZER.init(params)), jax.random.normal(keys[4], (8, 8))


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "schedule"),
    [
        (1, 1, "1f1b"),
        pytest.param(1, 2, "1f1b", marks=pytest.mark.bulk),
        pytest.param(2, 4, "1f1b", marks=pytest.mark.bulk),
        (4, 4, "interleaved-1f1b"),
        pytest.param(2, 2, "zero-bubble-h1", marks=pytest.mark.bulk),
    ],
)
def test_an_evaluation_computes_what_the_forward_pass_does(
    close, training, num_stages, num_microbatches, schedule
):
    state, batch = training
    loss, each = jax.jit(_loss)(state[0], batch)
    step = alpa.parallelize(
        _step,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        max_mesh_axes=1,
    )
    same, metrics = step.evaluate(state, batch)
    close(same, state)
    expected = {"loss": loss, "each": each, "perplexity": jnp.exp(loss), "norm": None}
    close(metrics, expected)
    again, _ = step(state, batch)  # the state was not given away
    phases = {i.phase for p in step.schedule.programs for i in p if i.kind == "run"}
    assert any(phase.startswith("backward") for phase in phases)
    expected = _loss(step.gather(again)[0], batch)[0]
    close(step.evaluate(again, batch)[1]["loss"], expected)


def test_nothing_of_the_backward_runs(training):
    state, batch = training
    step = alpa.parallelize(_step, num_stages=2, num_microbatches=4, max_mesh_axes=1)
    evaluation = step.lower(state, batch).evaluation
    schedule = evaluation.executable.schedule
    runs = [i for p in schedule.programs for i in p if i.kind == "run"]
    assert {i.phase for i in runs} <= {"start", "forward", "update"}
    assert [i.microbatch for i in runs if i.phase == "forward"] == [*range(4), *range(4)]
    assert schedule.name == "forward-only"
    assert evaluation.computed.count(False) == 1


@pytest.mark.sample(num_stages=1)
@pytest.mark.parametrize("num_stages", [2, 1])
def test_a_loss_with_a_gradient_inside_is_of_the_forward_pass(close, training, num_stages):
    (params, _), batch = training

    def penalised(params, batch):
        slopes = jax.vmap(jax.grad(lambda x: _loss(params, x)[0]))(batch)
        return _loss(params, batch)[0] + jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1)) - 1) ** 2)

    def step(params, batch):
        loss, gradients = jax.value_and_grad(penalised)(params, batch)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], {"loss": loss}

    step = alpa.parallelize(step, num_stages=num_stages, num_microbatches=2, max_mesh_axes=1)
    close(step.evaluate(params, batch)[1]["loss"], penalised(params, batch))


def test_where_nothing_is_left_to_compute_the_state_comes_back(close, training):
    (params, _), batch = training

    def step(params, batch):
        gradients = jax.grad(lambda params: _loss(params, batch)[0])(params)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)]

    step = alpa.parallelize(step, num_stages=2, num_microbatches=2, max_mesh_axes=1)
    close(step.evaluate(params, batch), params)


def test_where_nothing_is_left_to_compute_in_the_last_stage_the_first_one_runs(close, training):
    (params, _), batch = training

    def step(params, batch):
        gradients = jax.grad(lambda params: _loss(params, batch)[0])(params)
        metrics = {"first": jnp.tanh(batch @ params[0])}
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], metrics

    step = alpa.parallelize(step, num_stages=2, num_microbatches=2, max_mesh_axes=1)
    expected = jnp.tanh(batch @ params[0])
    close(step.evaluate(params, batch), (params, {"first": expected}))


def test_nnx_objects_are_evaluated_and_stay_as_they_were(close):
    def train_step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    batch = jax.random.normal(jax.random.key(0), (8, 8))
    step = alpa.parallelize(train_step)
    step(model, optimizer, batch)
    before = jax.device_get(nnx.state((model, optimizer)))
    for other in (batch, batch + 1.0):
        close(step.evaluate(model, optimizer, other), jnp.mean(model(other) ** 2))
    close(jax.device_get(nnx.state((model, optimizer))), before)
