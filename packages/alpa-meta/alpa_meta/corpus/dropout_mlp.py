"""A residual perceptron with dropout in plain JAX; the key in its state is a uint32[2] array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, random_model
from alpa_meta.types import PyTree

KEEP = 0.9


@frozen(kw_only=True)
class DropoutShape:
    """Sizes of the network and of its batch."""

    num_layers: int
    hidden: int
    batch: int


SHAPES = {
    "tiny": DropoutShape(num_layers=2, hidden=32, batch=16),
    "small": DropoutShape(num_layers=8, hidden=1024, batch=512),
    "large": DropoutShape(num_layers=16, hidden=16384, batch=8192),
}


def build(size: str = "tiny") -> CorpusModel:
    """Return the perceptron with dropout of `size`, trained to fit random targets."""
    shape = SHAPES[size]
    dims = (shape.batch, shape.hidden)

    def init(key: jax.Array) -> PyTree:
        def layer(key: jax.Array) -> PyTree:
            up_key, down_key = jax.random.split(key)
            fan_in = shape.hidden
            return {
                "up": fan_in**-0.5 * jax.random.normal(up_key, (fan_in, 4 * fan_in)),
                "down": fan_in**-0.5 * jax.random.normal(down_key, (4 * fan_in, fan_in)),
            }

        return [layer(k) for k in jax.random.split(key, shape.num_layers)]

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        x = batch["inputs"]
        for layer, layer_key in zip(params, jax.random.split(key, len(params)), strict=True):
            inner = jax.nn.gelu(x @ layer["up"])
            kept = jax.random.bernoulli(layer_key, KEEP, inner.shape)
            x = x + jnp.where(kept, inner / KEEP, 0.0) @ layer["down"]
        return jnp.mean(jnp.square(x - batch["targets"]))

    def make_batch(key: jax.Array) -> PyTree:
        input_key, target_key = jax.random.split(key)
        return {
            "inputs": jax.random.normal(input_key, dims),
            "targets": jax.random.normal(target_key, dims),
        }

    return random_model(
        name="dropout-mlp",
        size=size,
        init=init,
        loss=loss,
        make_batch=make_batch,
        optimizer=optax.adam(1e-3),
        typed_key=False,
    )
