"""A training step of two layers with metrics of the whole batch and of each example."""

import jax
import jax.numpy as jnp

SHAPE = jax.ShapeDtypeStruct
STATE = {"first": SHAPE((4, 4), jnp.float32), "second": SHAPE((4, 4), jnp.float32)}
BATCH = SHAPE((8, 4), jnp.float32)


def step(state, batch):
    def loss(state):
        errors = jnp.sum((jnp.tanh(batch @ state["first"]) @ state["second"]) ** 2, -1)
        return errors.mean(), errors

    (value, errors), gradients = jax.value_and_grad(loss, has_aux=True)(state)
    updated = jax.tree.map(lambda w, g: w - g, state, gradients)
    return updated, {"loss": value, "errors": errors, "worst": errors.max()}
