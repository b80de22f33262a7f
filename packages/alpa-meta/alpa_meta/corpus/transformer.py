"""A transformer over tokens in plain JAX, as Alpa's, Galvatron's and TeraPipe's papers train it.

Pre-norm blocks of attention and a GELU feed-forward network; with `num_experts`, every second
block's network is a mixture of experts. Weights are float32 and cast to the compute dtype on use.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model, optimiser
from alpa_meta.corpus.moe import through_experts
from alpa_meta.corpus.tokens import next_token_batch, next_token_loss
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class TransformerShape:
    """Sizes of the network and of its batch; `capacity` is tokens per expert and sequence."""

    num_layers: int
    hidden: int
    num_heads: int
    inner: int
    vocab: int
    length: int
    batch: int
    dtype: str
    causal: bool = True
    num_experts: int = 0
    capacity: int = 0
    optimiser: str = "adamw"

    def routed(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.num_experts > 0 and layer % 2 == 0


def of_shape(name: str, shape: TransformerShape) -> CorpusModel:
    """Return the transformer of a shape."""

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return next_token_loss(_logits(params, batch["tokens"], shape), batch["labels"])

    return deterministic_model(
        name=name,
        size="large",
        init=lambda key: _init(key, shape),
        loss=loss,
        make_batch=lambda key: next_token_batch(key, shape.batch, shape.length, shape.vocab),
        optimizer=optimiser(shape.optimiser),
    )


def _init(key: jax.Array, shape: TransformerShape) -> PyTree:
    embed_key, position_key, head_key, *layer_keys = jax.random.split(key, shape.num_layers + 3)
    return {
        "embed": _weight(embed_key, shape.vocab, shape.hidden),
        "position": _weight(position_key, shape.length, shape.hidden),
        "layers": [_init_layer(k, shape, number) for number, k in enumerate(layer_keys)],
        "norm": _init_norm(shape.hidden),
        "head": _weight(head_key, shape.hidden, shape.vocab),
    }


def _weight(key: jax.Array, *dims: int) -> jax.Array:
    return 0.02 * jax.random.normal(key, dims)


def _init_norm(hidden: int) -> PyTree:
    return {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}


def _init_layer(key: jax.Array, shape: TransformerShape, number: int) -> PyTree:
    qkv_key, out_key, router_key, up_key, down_key = jax.random.split(key, 5)
    hidden, inner, heads = shape.hidden, shape.inner, shape.num_heads
    head = hidden // heads
    layer = {
        "norm_1": _init_norm(hidden),
        "qkv": _weight(qkv_key, 3, hidden, heads, head),
        "qkv_bias": jnp.zeros((3, heads, head)),
        "out": _weight(out_key, heads, head, hidden),
        "out_bias": jnp.zeros(hidden),
        "norm_2": _init_norm(hidden),
    }
    if shape.routed(number):
        return layer | {
            "router": _weight(router_key, hidden, shape.num_experts),
            "up": _weight(up_key, shape.num_experts, hidden, inner),
            "down": _weight(down_key, shape.num_experts, inner, hidden),
        }
    return layer | {
        "up": _weight(up_key, hidden, inner),
        "up_bias": jnp.zeros(inner),
        "down": _weight(down_key, inner, hidden),
        "down_bias": jnp.zeros(hidden),
    }


def _norm(params: PyTree, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    y: jax.Array = wide.astype(x.dtype)
    return y


def _attention(params: PyTree, x: jax.Array, causal: bool) -> jax.Array:
    dtype = x.dtype
    qkv = jnp.einsum("bld,tdhk->tblhk", x, params["qkv"].astype(dtype))
    q, k, v = qkv + params["qkv_bias"].astype(dtype)[:, None, None]
    scores = jnp.einsum("bqhk,bmhk->bhqm", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    if causal:
        position = jnp.arange(x.shape[1])
        scores = jnp.where(position[:, None] >= position[None, :], scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    mixed = jnp.einsum("bhqm,bmhk->bqhk", weights, v)
    out: jax.Array = jnp.einsum("blhk,hkd->bld", mixed, params["out"].astype(dtype))
    out = out + params["out_bias"].astype(dtype)
    return out


def _feed_forward(params: PyTree, x: jax.Array) -> jax.Array:
    dtype = x.dtype
    inner = jax.nn.gelu(x @ params["up"].astype(dtype) + params["up_bias"].astype(dtype))
    y: jax.Array = inner @ params["down"].astype(dtype) + params["down_bias"].astype(dtype)
    return y


def _experts(params: PyTree, x: jax.Array, shape: TransformerShape) -> jax.Array:
    def run(inputs: jax.Array) -> jax.Array:
        up, down = params["up"].astype(x.dtype), params["down"].astype(x.dtype)
        inner = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, up))
        return jnp.einsum("ebcf,efd->ebcd", inner, down)

    gates = jax.nn.softmax((x @ params["router"].astype(x.dtype)).astype(jnp.float32))
    return through_experts(x, gates, shape.num_experts, shape.capacity, run)


@functools.partial(jax.jit, static_argnames=("shape", "routed"))
def _block(params: PyTree, x: jax.Array, shape: TransformerShape, routed: bool) -> jax.Array:
    """Return what a block makes of `x`; equal blocks are traced once."""
    x = x + _attention(params, _norm(params["norm_1"], x), shape.causal)
    y = _norm(params["norm_2"], x)
    return x + (_experts(params, y, shape) if routed else _feed_forward(params, y))


def _logits(params: PyTree, tokens: jax.Array, shape: TransformerShape) -> jax.Array:
    """Return [batch, length, vocab] in the compute dtype."""
    dtype = jnp.dtype(shape.dtype)
    x = params["embed"].astype(dtype)[tokens] + params["position"].astype(dtype)
    for number, layer in enumerate(params["layers"]):
        x = _block(layer, x, shape, shape.routed(number))
    logits: jax.Array = _norm(params["norm"], x) @ params["head"].astype(dtype)
    return logits
