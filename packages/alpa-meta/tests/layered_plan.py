"""A plan of equal layers with momentum, for two hosts with a slow link between them."""

import functools

import jax
import jax.numpy as jnp

import alpa_meta

WIDTH, LAYERS, BATCH = 2048, 4, 512
CLUSTER = "p3.16xlarge:16"


def step(state, batch):
    """Return one step of descent with momentum."""

    def loss(weights):
        x = batch
        for weight in weights:
            x = x + jnp.tanh(x @ weight["up"]) @ weight["down"]
        return jnp.mean(x**2)

    weights, momentum = state
    value, gradients = jax.value_and_grad(loss)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum), value


def shapes(width=WIDTH, batch=BATCH, layers=LAYERS):
    """Return the shapes of the state and the batch."""
    layer = {
        "up": jax.ShapeDtypeStruct((width, 4 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((4 * width, width), jnp.float32),
    }
    state = ([layer] * layers, [layer] * layers)
    return state, jax.ShapeDtypeStruct((batch, width), jnp.float32)


@functools.cache
def lowered(width=WIDTH, batch=BATCH, layers=LAYERS, **options):
    """Return the planned step."""
    options = {"num_microbatches": 8, "num_layers": layers, "cache": False, **options}
    return alpa_meta.parallelize(step, cluster=CLUSTER, **options).lower(
        *shapes(width, batch, layers)
    )
