"""State with an entry for each example, such as what a recurrent network carries from batch to
batch: a microbatch reads and makes its own part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa

DRAW = np.random.default_rng(0)
WEIGHTS = {"in": jnp.asarray(DRAW.normal(size=(4, 8))), "out": jnp.asarray(DRAW.normal(size=8))}
BATCH = {"x": jnp.asarray(DRAW.normal(size=(8, 3, 4))), "y": jnp.asarray(DRAW.normal(size=8))}


def step(state, batch):
    weights, carried = state

    def loss(w):
        def advance(h, x):
            return jnp.tanh(0.5 * h + x @ w["in"]), None

        last, _ = jax.lax.scan(advance, carried, batch["x"].swapaxes(0, 1))
        return jnp.mean((last @ w["out"] - batch["y"]) ** 2), last

    (value, last), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), last), value


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 1, "num_microbatches": 4},  # of 2 examples, for 4 devices
        {"num_stages": 2, "num_microbatches": 2},
    ],
    ids=["fewer examples than devices", "two stages"],
)
def test_state_of_examples_is_that_of_one_device(options: dict[str, Any]):
    state = expected = (WEIGHTS, jnp.zeros((8, 8)))
    parallel = alpa.parallelize(step, cluster="host:4", **options)
    state = jax.tree.map(jnp.copy, state)
    for _ in range(2):
        expected, right = jax.jit(step)(expected, BATCH)
        state, found = parallel(state, BATCH)
        np.testing.assert_allclose(found, right, rtol=2e-5)
    pairs = zip(jax.tree.leaves(parallel.gather(state)), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
