"""Every pipeline schedule computes what one device does: loss, gradients and parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_meta as alpa
from alpa_meta.options import SCHEDULES
from alpa_meta.report.predicted_events import predicted_events

WIDTH = 8


def _loss(params, batch):
    x = batch
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def _step(state, batch):
    """Descend along the gradient, and return it beside the loss."""
    loss, gradients = jax.value_and_grad(_loss)(state, batch)
    state = jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients)
    return state, {"loss": loss, "gradients": gradients}


def _training(num_layers=4, batch=8):
    keys = jax.random.split(jax.random.key(0), num_layers)
    state = [{"w": 0.3 * jax.random.normal(k, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)} for k in keys]
    batches = [jax.random.normal(jax.random.key(1 + k), (batch, WIDTH)) for k in range(2)]
    return _step, state, batches


RUN_BY_DEFAULT = ("1f1b", "interleaved-1f1b", "zero-bubble-h1")
"""The others order the same tasks; test_emission of stage-dp has the orders of all."""
CASES = [
    pytest.param(schedule, *counts, marks=marks)
    for schedule in SCHEDULES
    for counts, marks in (
        ((4, 8), () if schedule in RUN_BY_DEFAULT else pytest.mark.bulk),
        ((4, 4) if "interleaved" in schedule else (2, 4), pytest.mark.bulk),
    )
]


@pytest.mark.parametrize(("schedule", "num_stages", "num_microbatches"), CASES)
def test_every_schedule_equals_one_device(agrees, schedule, num_stages, num_microbatches):
    parallel = agrees(
        *_training(),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        max_mesh_axes=1,
        schedule=schedule,
    )
    assert parallel.plan.stage_plan.schedule == schedule
    stop = max(event.stop for event in predicted_events(parallel.plan))
    assert stop == pytest.approx(parallel.plan.step_seconds, rel=1e-9)
    assert all(c.candidate.boundary_seconds > 0 for c in parallel.plan.stage_plan.stages[:-1])
    assert parallel.schedule.name == schedule
    assert parallel.plan.num_stages == num_stages
    if "interleaved" in schedule:
        assert parallel.plan.stage_plan.num_meshes == 2


def test_chunks_of_one_mesh_may_lay_out_the_same_value_in_two_ways(agrees):
    """The batch and a skipped value are read by both chunks of a mesh, tied weights by two."""

    def loss(params, batch):
        first = x = jnp.tanh(batch @ params["tied"])
        for w in params["inner"]:
            x = jnp.tanh(x @ w) + 0.1 * first
        return jnp.mean((x @ params["tied"].T - batch) ** 2)

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    keys = jax.random.split(jax.random.key(3), 6)
    params = {
        "tied": 0.3 * jax.random.normal(keys[0], (8, 16)),
        "inner": [0.3 * jax.random.normal(k, (16, 16)) for k in keys[1:5]],
    }
    batches = [jax.random.normal(keys[5], (16, 8))] * 2
    agrees(step, params, batches, num_stages=4, num_microbatches=4, schedule="interleaved-1f1b")


def test_a_chosen_schedule_is_no_slower_than_any_that_is_searched(agrees):
    step, state, batches = _training()
    chosen: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "max_mesh_axes": 1}
    parallel = agrees(step, state, batches, schedule=None, **chosen)
    for schedule in set(SCHEDULES) - {"interleaved-1f1b"}:  # which has four stages at least
        named = alpa.parallelize(step, schedule=schedule, **chosen).plan_for(state, batches[0])
        assert parallel.plan.step_seconds <= named.step_seconds * (1 + 1e-9)
