"""The small network whose training steps the whole-system tests write in many ways."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

QUICK: dict[str, Any] = {"num_stages": 1, "max_mesh_axes": 1, "cluster": "host:4"}
PARTS: dict[str, Any] = {**QUICK, "num_microbatches": 2}
PIPELINE: dict[str, Any] = {**PARTS, "num_stages": 2}
SIZE, BATCH = 8, 8


def make_params(seed=0):
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "up": jax.random.normal(first, (SIZE, 2 * SIZE)) / 3,
        "bias": jnp.zeros(2 * SIZE),
        "down": jax.random.normal(second, (2 * SIZE, SIZE)) / 3,
    }


def _batch(seed):
    x, y = jax.random.normal(jax.random.key(seed), (2, BATCH, SIZE))
    return {"x": x, "y": y}


BATCHES = [_batch(seed) for seed in (1, 2, 3)]


def predict(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def errors_of(params, batch):
    """Return the error of each example, [batch]."""
    return jnp.sum((predict(params, batch["x"]) - batch["y"]) ** 2, axis=-1)


def mean_loss(params, batch):
    return errors_of(params, batch).mean()


def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)
