"""Small batches that the programs train on: the same every run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

EXAMPLES, LENGTH, VOCABULARY = 8, 6, 32
WIDTH = 8


def padded_tokens(length: int = LENGTH, seed: int = 0) -> dict[str, jnp.ndarray]:
    """Return `inputs` and `targets` [examples, length] of unlike lengths, padded with 0."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, VOCABULARY, (EXAMPLES, length + 1))
    lengths = 2 + np.arange(EXAMPLES) * 5 % length
    tokens[np.arange(length + 1) > lengths[:, None]] = 0
    return {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def images(size: int = 8, channels: int = 1, seed: int = 0) -> dict[str, jnp.ndarray]:
    """Return `image` [examples, size, size, channels] in [0, 1] and `label` [examples]."""
    draw = np.random.default_rng(seed)
    pixels = draw.uniform(size=(EXAMPLES, size, size, channels)).astype("float32")
    return {"image": jnp.asarray(pixels), "label": jnp.asarray(draw.integers(0, 4, EXAMPLES))}


def points(width: int = WIDTH, seed: int = 0) -> dict[str, jnp.ndarray]:
    """Return `x` [examples, width] and `y` [examples]."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(EXAMPLES, width)).astype("float32")
    return {"x": jnp.asarray(x), "y": jnp.asarray(np.sin(x.sum(1)))}
