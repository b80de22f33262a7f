"""Gradients summed in a loop travel once, behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from descent import descend

import alpa_meta as alpa

RNG = np.random.default_rng(0)
LAYERS = {
    "kernel": jnp.asarray(RNG.normal(size=(6, 16, 16)) / 4, jnp.float32),
    "bias": jnp.zeros((6, 16)),
}
SHARED = jax.tree.map(lambda stacked: stacked[0], LAYERS)
BATCH = RNG.normal(size=(8192, 16)).astype(np.float32)


def layer(hidden, weights):
    return jnp.tanh(hidden @ weights["kernel"] + weights["bias"]), None


def scanned_layers(layers, batch):
    return jnp.mean(jax.lax.scan(layer, batch, layers)[0] ** 2)


def recomputed_layers(layers, batch):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, layers)[0] ** 2)


def repeated_layer(weights, batch):
    def again(hidden, _):
        return layer(hidden, weights)

    return jnp.mean(jax.lax.scan(again, batch, None, 6)[0] ** 2)


def accumulating_step(weights, batch):
    """Sum gradients over parts of the batch, as users write it."""

    def add_part(total, part):
        value, gradients = jax.value_and_grad(repeated_layer)(weights, part)
        return jax.tree.map(jnp.add, total, gradients), value

    zeros = jax.tree.map(jnp.zeros_like, weights)
    total, values = jax.lax.scan(add_part, zeros, batch.reshape(4, -1, 16))
    return jax.tree.map(lambda w, g: w - 0.025 * g, weights, total), values.mean()


STEPS = {
    "scanned layers": (descend(scanned_layers), LAYERS),
    "recomputed layers": (descend(recomputed_layers), LAYERS),
    "one layer repeated": (descend(repeated_layer), SHARED),
    "accumulated by the user": (accumulating_step, SHARED),
}


@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [*((name, 1) for name in STEPS), ("recomputed layers", 4), ("one layer repeated", 4)],
)
def test_gradients_are_reduced_once(name, num_microbatches):
    step, weights = STEPS[name]
    parallel = alpa.parallelize(
        step,
        cluster="host:4",
        preset="dp",
        num_stages=1,
        num_microbatches=num_microbatches,
        donate=False,
    )
    changed, loss = parallel(weights, BATCH)
    expected, expected_loss = jax.jit(step)(weights, BATCH)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one in weights:
        np.testing.assert_allclose(changed[one], expected[one], rtol=1e-4, atol=1e-6)
    sums = [
        sent
        for task in parallel.executable.planned_collectives().values()
        for sent in task
        if sent.kind in ("all-reduce", "reduce-scatter") and sent.bytes > 4  # the loss
    ]
    assert sums
    assert all(sent.trips == 1 for sent in sums), sums
    assert parallel.executable.audit().ok
