"""Denoising diffusion on the corpus's U-Net: noise and time steps are drawn inside the step.

The key is a typed key in the state (`jax.random.key`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from alpa_meta.corpus.model import CorpusModel, random_model
from alpa_meta.corpus.unet import SHAPES, UNet
from alpa_meta.types import PyTree

NUM_STEPS = 1000


def build(size: str = "tiny") -> CorpusModel:
    """Return the diffusion model of `size` (Ho et al., DDPM, algorithm 1)."""
    shape = SHAPES[size]
    network = UNet(shape)
    dims = (shape.batch, shape.image, shape.image, shape.image_channels)
    time_features = 4 * shape.channels[0]

    def init(key: jax.Array) -> PyTree:
        images, time = jnp.zeros((1, *dims[1:])), jnp.zeros((1, time_features))
        return network.init(key, images, time)["params"]

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        step_key, noise_key = jax.random.split(key)
        steps = jax.random.randint(step_key, (shape.batch,), 0, NUM_STEPS)
        noise = jax.random.normal(noise_key, dims)
        kept = jnp.cumprod(1.0 - jnp.linspace(1e-4, 0.02, NUM_STEPS))[steps][:, None, None, None]
        noisy = jnp.sqrt(kept) * batch["images"] + jnp.sqrt(1.0 - kept) * noise
        time = _embed_time(steps, time_features)
        predicted: PyTree = network.apply({"params": params}, noisy, time)
        return jnp.mean(jnp.square(predicted - noise))

    return random_model(
        name="diffusion",
        size=size,
        init=init,
        loss=loss,
        make_batch=lambda key: {"images": jax.random.normal(key, dims)},
        optimizer=optax.adam(1e-3),
        typed_key=True,
    )


def _embed_time(steps: jax.Array, features: int) -> jax.Array:
    """Return sines and cosines [batch, features] of the integer time steps [batch]."""
    half = features // 2
    frequency = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / half)
    angle = steps[:, None].astype(jnp.float32) * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
