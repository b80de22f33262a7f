"""A recommendation model (DLRM) in plain JAX: embedding bags, pairwise interactions, Adagrad."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class DLRMShape:
    """Sizes of the network and of its batch: `bag` indices per table and example."""

    num_tables: int
    rows: int
    features: int
    num_dense: int
    bag: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int


SHAPES = {
    "tiny": DLRMShape(
        num_tables=3, rows=64, features=16, num_dense=8, bag=4, bottom=(32,), top=(32,), batch=16
    ),
    "small": DLRMShape(
        num_tables=8,
        rows=200_000,
        features=64,
        num_dense=16,
        bag=8,
        bottom=(512, 256),
        top=(512, 256),
        batch=2048,
    ),
    "large": DLRMShape(
        num_tables=26,
        rows=4_000_000,
        features=128,
        num_dense=16,
        bag=16,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
        batch=65536,
    ),
}


def build(size: str = "tiny") -> CorpusModel:
    """Return the DLRM of `size` (Naumov et al., section 2)."""
    shape = SHAPES[size]
    num_vectors = shape.num_tables + 1
    num_pairs = num_vectors * (num_vectors - 1) // 2

    def init(key: jax.Array) -> PyTree:
        table_key, bottom_key, top_key = jax.random.split(key, 3)
        table_keys = jax.random.split(table_key, shape.num_tables)
        return {
            "tables": [
                0.1 * jax.random.normal(k, (shape.rows, shape.features)) for k in table_keys
            ],
            "bottom": _init_mlp(bottom_key, (shape.num_dense, *shape.bottom, shape.features)),
            "top": _init_mlp(top_key, (shape.features + num_pairs, *shape.top, 1)),
        }

    def make_batch(key: jax.Array) -> PyTree:
        dense_key, index_key, label_key = jax.random.split(key, 3)
        indices = (shape.batch, shape.num_tables, shape.bag)
        return {
            "dense": jax.random.normal(dense_key, (shape.batch, shape.num_dense)),
            "indices": jax.random.randint(index_key, indices, 0, shape.rows, jnp.int32),
            "labels": jax.random.bernoulli(label_key, 0.3, (shape.batch,)).astype(jnp.float32),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        dense = _mlp(params["bottom"], batch["dense"])
        bags = [
            jnp.take(table, batch["indices"][:, index], axis=0).sum(axis=1)
            for index, table in enumerate(params["tables"])
        ]
        vectors = jnp.stack([dense, *bags], axis=1)
        products = jnp.einsum("bif,bjf->bij", vectors, vectors)
        rows, columns = jnp.tril_indices(num_vectors, -1)
        features = jnp.concatenate([dense, products[:, rows, columns]], axis=-1)
        logits = _mlp(params["top"], features)[:, 0]
        losses: PyTree = optax.sigmoid_binary_cross_entropy(logits, batch["labels"])
        return jnp.mean(losses)

    return deterministic_model(
        name="dlrm",
        size=size,
        init=init,
        loss=loss,
        make_batch=make_batch,
        optimizer=optax.adagrad(1e-2),
    )


def _init_mlp(key: jax.Array, widths: tuple[int, ...]) -> PyTree:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"weight": fan_in**-0.5 * jax.random.normal(k, (fan_in, width)), "bias": jnp.zeros(width)}
        for k, fan_in, width in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def _mlp(params: PyTree, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    outputs: jax.Array = x @ last["weight"] + last["bias"]
    return outputs
