"""A training step of a perceptron with as many layers as it is given weights."""

import jax
import jax.numpy as jnp


def loss(weights, batch):
    hidden = batch
    for weight in weights:
        hidden = jnp.tanh(hidden @ weight)
    return jnp.mean(hidden**2)


def step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value
