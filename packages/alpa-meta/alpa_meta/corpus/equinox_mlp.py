"""A multilayer perceptron in equinox: the state is the module without its non-array leaves."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class MLPShape:
    """Sizes of the network and of its batch."""

    features: int
    inner: int
    depth: int
    batch: int


SHAPES = {
    "tiny": MLPShape(features=32, inner=64, depth=2, batch=16),
    "small": MLPShape(features=1024, inner=4096, depth=4, batch=512),
    "large": MLPShape(features=16384, inner=65536, depth=8, batch=8192),
}


def build(size: str = "tiny") -> CorpusModel:
    """Return the perceptron of `size`, trained to fit random targets."""
    shape = SHAPES[size]

    def network(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(shape.features, shape.features, shape.inner, shape.depth, key=key)

    def is_array(leaf: object) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    static = eqx.partition(eqx.filter_eval_shape(network, jax.random.key(0)), is_array)[1]

    def init(key: jax.Array) -> PyTree:
        return eqx.partition(network(key), eqx.is_array)[0]

    def make_batch(key: jax.Array) -> PyTree:
        input_key, target_key = jax.random.split(key)
        dims = (shape.batch, shape.features)
        return {
            "inputs": jax.random.normal(input_key, dims),
            "targets": jax.random.normal(target_key, dims),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        outputs = jax.vmap(eqx.combine(params, static))(batch["inputs"])
        return jnp.mean(jnp.square(outputs - batch["targets"]))

    return deterministic_model(
        name="equinox-mlp",
        size=size,
        init=init,
        loss=loss,
        make_batch=make_batch,
        optimizer=optax.adam(1e-3),
    )
