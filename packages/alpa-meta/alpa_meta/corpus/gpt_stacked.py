"""GPT in plain JAX with all layers' weights stacked on dim 0 and the embedding tied to the head.

`scan=True` runs the layers by `lax.scan`, `scan=False` unrolls the same layers over the same
arrays kept as a list; `remat=True` recomputes each block in the backward pass. The three
combinations in the catalogue are the same function of the same numbers, so their plans can be
compared.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from alpa_meta.corpus.gpt import SHAPES, GPTShape
from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.corpus.tokens import next_token_batch, next_token_loss
from alpa_meta.types import PyTree


def build(size: str = "tiny", *, scan: bool = True, remat: bool = True) -> CorpusModel:
    """Return the GPT with tied weights of `size`."""
    shape = SHAPES[size]

    def init(key: jax.Array) -> PyTree:
        embed_key, position_key, layers_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(layers_key, shape.num_layers)
        layers = (
            jax.vmap(lambda k: _init_block(k, shape.hidden, shape.num_heads))(layer_keys)
            if scan
            else [_init_block(k, shape.hidden, shape.num_heads) for k in layer_keys]
        )
        return {
            "embed": 0.02 * jax.random.normal(embed_key, (shape.vocab, shape.hidden)),
            "position": 0.02 * jax.random.normal(position_key, (shape.length, shape.hidden)),
            "layers": layers,
            "norm": _init_norm(shape.hidden),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        logits = _logits(params, batch["tokens"], shape, scan=scan, remat=remat)
        return next_token_loss(logits, batch["labels"])

    return deterministic_model(
        name="gpt-scan" if scan else "gpt-remat" if remat else "gpt-tied",
        size=size,
        init=init,
        loss=loss,
        make_batch=lambda key: next_token_batch(key, shape.batch, shape.length, shape.vocab),
        optimizer=optax.adamw(1e-3),
    )


def _logits(
    params: PyTree, tokens: jax.Array, shape: GPTShape, *, scan: bool, remat: bool
) -> jax.Array:
    """Return [batch, length, vocab]."""
    block = jax.checkpoint(_block) if remat else _block
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    if scan:
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(layer, x)
    logits: jax.Array = _norm(params["norm"], x) @ params["embed"].T
    return logits


def _init_norm(hidden: int) -> PyTree:
    return {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}


def _init_block(key: jax.Array, hidden: int, num_heads: int) -> PyTree:
    qkv_key, out_key, up_key, down_key = jax.random.split(key, 4)
    head = hidden // num_heads
    return {
        "norm_1": _init_norm(hidden),
        "qkv": 0.02 * jax.random.normal(qkv_key, (3, hidden, num_heads, head)),
        "out": 0.02 * jax.random.normal(out_key, (num_heads, head, hidden)),
        "norm_2": _init_norm(hidden),
        "up": 0.02 * jax.random.normal(up_key, (hidden, 4 * hidden)),
        "up_bias": jnp.zeros(4 * hidden),
        "down": 0.02 * jax.random.normal(down_key, (4 * hidden, hidden)),
        "down_bias": jnp.zeros(hidden),
    }


def _norm(params: PyTree, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    y: jax.Array = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    return y


def _block(params: PyTree, x: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bld,tdhk->tblhk", _norm(params["norm_1"], x), params["qkv"])
    scores = jnp.einsum("bqhk,bmhk->bhqm", q, k) / math.sqrt(q.shape[-1])
    length = x.shape[1]
    visible = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqm,bmhk->bqhk", weights, v)
    x = x + jnp.einsum("blhk,hkd->bld", mixed, params["out"])
    inner = jax.nn.gelu(_norm(params["norm_2"], x) @ params["up"] + params["up_bias"])
    y: jax.Array = x + inner @ params["down"] + params["down_bias"]
    return y
