"""Gradients summed in a loop travel once, behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa

RNG = np.random.default_rng(0)
LAYERS = {
    "kernel": jnp.asarray(RNG.normal(size=(6, 16, 16)) / 4, jnp.float32),
    "bias": jnp.zeros((6, 16)),
}
BATCH = RNG.normal(size=(8192, 16)).astype(np.float32)


def scanned(remat):
    def layer(hidden, weights):
        return jnp.tanh(hidden @ weights["kernel"] + weights["bias"]), None

    def step(layers, batch):
        def loss(layers):
            body = jax.checkpoint(layer) if remat else layer
            return jnp.mean(jax.lax.scan(body, batch, layers)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), value

    return step


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_gradients_of_scanned_layers_are_reduced_once(remat, num_microbatches):
    step = scanned(remat)
    parallel = alpa.parallelize(
        step,
        cluster="host:4",
        preset="dp",
        num_stages=1,
        num_microbatches=num_microbatches,
        donate=False,
    )
    layers, loss = parallel(LAYERS, BATCH)
    expected_layers, expected_loss = jax.jit(step)(LAYERS, BATCH)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in LAYERS:
        np.testing.assert_allclose(layers[name], expected_layers[name], rtol=1e-4, atol=1e-6)
    sums = [
        sent
        for task in parallel.executable.planned_collectives().values()
        for sent in task
        if sent.kind in ("all-reduce", "reduce-scatter")
    ]
    assert sums
    assert all(sent.trips == 1 for sent in sums)
    assert parallel.executable.audit().ok
