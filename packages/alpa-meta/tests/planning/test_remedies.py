"""A refusal names remedies that were planned."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from attrs import evolve

from alpa_meta.errors import InfeasibleError
from alpa_meta.options import Options
from alpa_meta.planning.planner import make_plan
from alpa_meta.step.program import Step
from cost_model import cluster

LAYERS, WIDTH, INNER, BATCH = 4, 32, 64, 1024
QUICK = Options(num_stages=1, num_microbatches=1, mesh_shape=(4,), solver_seconds=5.0)


def _block(weights, x):
    return x + jnp.tanh(jnp.tanh(x @ weights["up"]) @ weights["down"])


def make_step(couple=lambda x: x):
    def train_step(params, batch):
        def value(params):
            x = batch
            for weights in params:
                x = _block(weights, couple(x))
            return jnp.mean(x**2)

        gradients = jax.grad(value)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    layer = {
        "up": jax.ShapeDtypeStruct((WIDTH, INNER), jnp.float32),
        "down": jax.ShapeDtypeStruct((INNER, WIDTH), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return Step(train_step, ([layer] * LAYERS, batch))


def plan(step, devices=4, **settings):
    return make_plan(step, cluster(f"h100:{devices}"), evolve(QUICK, **settings))


def figures(pattern, message):
    """Return what the groups of a pattern match in a message."""
    found = re.search(pattern, message)
    assert found is not None, message
    return found.groups()


def refusal(step, **settings):
    with pytest.raises(InfeasibleError, match="cheapest remedy: ") as caught:
        plan(step, **settings)
    return str(caught.value)


@pytest.fixture(scope="module")
def half():
    """Half of what a step takes that is cut along its batch."""
    return sum(plan(make_step(), preset="dp").plan.shardings[0].memory.values()) / 2


def test_microbatches_that_are_named_fit_with_the_bytes_they_are_named_with(half):
    message = refusal(make_step(), memory=half)
    count, figure = figures(r"num_microbatches=(\d+) \(then ([\d,]+) bytes", message)
    planned = plan(make_step(), memory=half, num_microbatches=int(count))
    peak = planned.plan.stage_plan.peak_bytes[0]
    assert peak <= half and f"{peak:,.0f}" == figure


def test_a_batch_and_devices_that_are_named_fit(half):
    message = refusal(make_step(), memory=half)
    (size,) = figures(r"a batch of (\d+) examples instead of 1024 \(then", message)
    plan(make_step().with_batch(int(size)), memory=half)
    (count,) = map(int, figures(r"(\d+) devices \(then", message))
    plan(make_step(), devices=count, memory=half, mesh_shape=(count,))


def test_a_step_that_cannot_be_cut_is_not_told_to_use_microbatches(half):
    message = refusal(make_step(couple=lambda x: x / x.std(0)), memory=half)
    assert "num_microbatches" not in message and "a batch of " in message


def test_what_replicates_the_state_is_named():
    wide = plan(make_step(), preset="dp").plan.shardings[0].memory
    limit = sum(wide.values()) - 0.5 * wide["state"]
    told = {"num_stages": 1, "num_microbatches": 1, "recompute": "none"}
    message = refusal(make_step(), preset="dp", memory=limit, **told)
    assert re.search(r"preset 'zero[23]' instead of 'dp' \(then", message)


def test_recomputation_that_is_named_takes_the_bytes_it_is_named_with():
    def peak(kind, **settings):
        found = plan(make_step(), num_layers=LAYERS, preset="dp", recompute=kind, **settings).plan
        return found.stage_plan.peak_bytes[0]

    assert peak("full") < peak("none")
    settings = {"num_layers": LAYERS, "preset": "dp", "memory": 1.01 * peak("full")}
    message = refusal(make_step(), **settings)
    kind, figure = figures(r"recompute='(\w+)' \(then ([\d,]+) bytes", message)
    bytes = float(figure.replace(",", ""))
    assert peak(kind, memory=bytes) == bytes
    assert "recompute=" not in refusal(make_step(), recompute="none", **settings)
