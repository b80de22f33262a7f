"""A training step of a perceptron with as many layers as it is given weights."""

import jax
import jax.numpy as jnp
import optax

from alpa_meta.corpus.model import deterministic_model


def loss(weights, batch):
    hidden = batch
    for weight in weights:
        hidden = jnp.tanh(hidden @ weight)
    return jnp.mean(hidden**2)


def step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def model(width, depth, rows):
    """Return a corpus model of as many square layers."""
    return deterministic_model(
        name="perceptron",
        size="tiny",
        init=lambda key: [jax.random.normal(key, (width, width))] * depth,
        loss=loss,
        make_batch=lambda key: jax.random.normal(key, (rows, width)),
        optimizer=optax.sgd(0.1),
    )
