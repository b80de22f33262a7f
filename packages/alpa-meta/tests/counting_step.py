"""A training step of one layer that counts itself."""

import jax
import jax.numpy as jnp

SHAPE = jax.ShapeDtypeStruct
STATE = {"w": SHAPE((4, 4), jnp.float32), "count": SHAPE((), jnp.int32)}
BATCH = {"x": SHAPE((8, 4), jnp.float32)}


def step(state, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - gradient, "count": state["count"] + 1}, {"loss": value}
