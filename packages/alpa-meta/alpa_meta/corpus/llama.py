"""A Llama-style decoder in plain JAX: RoPE, grouped-query attention, SwiGLU, RMSNorm, bf16 compute.

Weights are kept in float32 and cast to the compute dtype on use, as in mixed-precision training.
The tiny size computes in float32, so that parallel and single-device runs can be compared closely.
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
class LlamaShape:
    """Sizes of the network and of its batch."""

    num_layers: int
    hidden: int
    num_heads: int
    num_key_value_heads: int
    inner: int
    vocab: int
    length: int
    batch: int
    dtype: str
    num_experts: int = 0  # SwiGLU networks of which each token takes two, as Mixtral's
    capacity: int = 0  # tokens per expert and sequence


SHAPES = {
    "tiny": LlamaShape(
        num_layers=2,
        hidden=64,
        num_heads=16,
        num_key_value_heads=8,
        inner=128,
        vocab=128,
        length=16,
        batch=16,
        dtype="float32",
    ),
    "small": LlamaShape(
        num_layers=16,
        hidden=2048,
        num_heads=32,
        num_key_value_heads=8,
        inner=8192,
        vocab=128256,
        length=2048,
        batch=16,
        dtype="bfloat16",
    ),
    "large": LlamaShape(
        num_layers=80,
        hidden=8192,
        num_heads=64,
        num_key_value_heads=8,
        inner=28672,
        vocab=128256,
        length=8192,
        batch=128,
        dtype="bfloat16",
    ),
}


def build(size: str = "tiny") -> CorpusModel:
    """Return the Llama-style model of `size` (the large one has the shape of Llama 3 70B)."""
    return of_shape("llama", SHAPES[size], size)


def of_shape(name: str, shape: LlamaShape, size: str = "large") -> CorpusModel:
    """Return the Llama-style model of a shape."""

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return next_token_loss(_logits(params, batch["tokens"], shape), batch["labels"])

    return deterministic_model(
        name=name,
        size=size,
        init=lambda key: _init(key, shape),
        loss=loss,
        make_batch=lambda key: next_token_batch(key, shape.batch, shape.length, shape.vocab),
        optimizer=optimiser("adamw"),
    )


def _init(key: jax.Array, shape: LlamaShape) -> PyTree:
    embed_key, head_key, *layer_keys = jax.random.split(key, shape.num_layers + 2)
    return {
        "embed": 0.02 * jax.random.normal(embed_key, (shape.vocab, shape.hidden)),
        "layers": [_init_layer(k, shape) for k in layer_keys],
        "norm": jnp.ones(shape.hidden),
        "head": 0.02 * jax.random.normal(head_key, (shape.hidden, shape.vocab)),
    }


def _init_layer(key: jax.Array, shape: LlamaShape) -> PyTree:
    experts = (shape.num_experts,) if shape.num_experts else ()
    keys = jax.random.split(key, 7 + len(experts))
    head = shape.hidden // shape.num_heads

    def weight(k: jax.Array, *dims: int) -> jax.Array:
        return 0.02 * jax.random.normal(k, dims)

    return {
        "attention_norm": jnp.ones(shape.hidden),
        "query": weight(keys[0], shape.hidden, shape.num_heads, head),
        "key": weight(keys[1], shape.hidden, shape.num_key_value_heads, head),
        "value": weight(keys[2], shape.hidden, shape.num_key_value_heads, head),
        "out": weight(keys[3], shape.num_heads, head, shape.hidden),
        "inner_norm": jnp.ones(shape.hidden),
        **{
            name: weight(k, *experts, *dims)
            for name, k, dims in (
                ("gate", keys[4], (shape.hidden, shape.inner)),
                ("up", keys[5], (shape.hidden, shape.inner)),
                ("down", keys[6], (shape.inner, shape.hidden)),
            )
        },
        **({"router": weight(keys[7], shape.hidden, shape.num_experts)} if experts else {}),
    }


def _rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def _rotary(x: jax.Array) -> jax.Array:
    """Return x [batch, length, heads, head] rotated by position (Su et al., RoFormer, eq. 34)."""
    length, head = x.shape[1], x.shape[-1]
    frequency = 10000.0 ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _attention(params: PyTree, x: jax.Array, shape: LlamaShape) -> jax.Array:
    dtype = x.dtype
    batch, length, _ = x.shape
    groups = shape.num_heads // shape.num_key_value_heads
    q = _rotary(jnp.einsum("bld,dhk->blhk", x, params["query"].astype(dtype)))
    k = _rotary(jnp.einsum("bld,dhk->blhk", x, params["key"].astype(dtype)))
    v = jnp.einsum("bld,dhk->blhk", x, params["value"].astype(dtype))
    q = q.reshape(batch, length, shape.num_key_value_heads, groups, q.shape[-1])
    scores = jnp.einsum("bqhgk,bmhk->bhgqm", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    position = jnp.arange(length)
    scores = jnp.where(position[:, None] >= position[None, :], scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    mixed = jnp.einsum("bhgqm,bmhk->bqhgk", weights, v)
    mixed = mixed.reshape(batch, length, shape.num_heads, mixed.shape[-1])
    return jnp.einsum("blhk,hkd->bld", mixed, params["out"].astype(dtype))


def _feed_forward(params: PyTree, x: jax.Array) -> jax.Array:
    dtype = x.dtype
    gated = jax.nn.silu(x @ params["gate"].astype(dtype)) * (x @ params["up"].astype(dtype))
    y: jax.Array = gated @ params["down"].astype(dtype)
    return y


def _experts(params: PyTree, y: jax.Array, shape: LlamaShape) -> jax.Array:
    def run(inputs: jax.Array) -> jax.Array:
        gate, up, down = (params[name].astype(y.dtype) for name in ("gate", "up", "down"))
        gated = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inputs, gate))
        return jnp.einsum("ebcf,efd->ebcd", gated * jnp.einsum("ebcd,edf->ebcf", inputs, up), down)

    gates = jax.nn.softmax((y @ params["router"].astype(y.dtype)).astype(jnp.float32))
    return through_experts(y, gates, shape.num_experts, shape.capacity, run)


@functools.partial(jax.jit, static_argnames="shape")
def _block(params: PyTree, x: jax.Array, shape: LlamaShape) -> jax.Array:
    """Return what a block makes of `x`; equal blocks are traced once."""
    x = x + _attention(params, _rms_norm(params["attention_norm"], x), shape)
    y = _rms_norm(params["inner_norm"], x)
    return x + (_experts(params, y, shape) if shape.num_experts else _feed_forward(params, y))


def _logits(params: PyTree, tokens: jax.Array, shape: LlamaShape) -> jax.Array:
    """Return [batch, length, vocab] in the compute dtype."""
    dtype = jnp.dtype(shape.dtype)
    x = params["embed"].astype(dtype)[tokens]
    for layer in params["layers"]:
        x = _block(layer, x, shape)
    logits: jax.Array = _rms_norm(params["norm"], x) @ params["head"].astype(dtype)
    return logits
