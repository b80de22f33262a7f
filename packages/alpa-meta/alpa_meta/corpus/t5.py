"""A T5-style encoder-decoder in flax linen: relative positions, cross-attention, Adafactor."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model, optimiser
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class T5Shape:
    """Sizes of the network and of its batch; padding is token 0."""

    num_layers: int
    hidden: int
    num_heads: int
    head: int
    inner: int
    vocab: int
    source: int
    target: int
    batch: int
    num_buckets: int = 32
    optimiser: str = ""  # empty: Adafactor as T5 was trained


SHAPES = {
    "tiny": T5Shape(
        num_layers=1,
        hidden=64,
        num_heads=8,
        head=8,
        inner=128,
        vocab=128,
        source=16,
        target=8,
        batch=16,
        num_buckets=8,
    ),
    "small": T5Shape(
        num_layers=12,
        hidden=768,
        num_heads=12,
        head=64,
        inner=3072,
        vocab=32128,
        source=512,
        target=128,
        batch=32,
    ),
    "large": T5Shape(
        num_layers=24,
        hidden=1024,
        num_heads=128,
        head=128,
        inner=65536,
        vocab=32128,
        source=512,
        target=512,
        batch=128,
    ),
}


class RelativeBias(nn.Module):
    """Learned bias [1, heads, queries, keys] by bucketed distance (Raffel et al., section 2.1)."""

    num_heads: int
    num_buckets: int
    causal: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        num_buckets = self.num_buckets
        offset = jnp.zeros_like(distance)
        if self.causal:
            distance = -jnp.minimum(distance, 0)
        else:
            num_buckets //= 2
            offset = (distance > 0).astype(jnp.int32) * num_buckets
            distance = jnp.abs(distance)
        exact = num_buckets // 2
        ratio = jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(128 / exact)
        coarse = exact + (ratio * (num_buckets - exact)).astype(jnp.int32)
        coarse = jnp.minimum(coarse, num_buckets - 1)
        bucket = offset + jnp.where(distance < exact, distance, coarse)
        table = self.param(
            "table", nn.initializers.normal(0.02), (self.num_buckets, self.num_heads)
        )
        return jnp.transpose(table[bucket], (2, 0, 1))[None]


class Attention(nn.Module):
    """Attention of `x` [batch, queries, hidden] on `memory` [batch, keys, hidden]."""

    shape: T5Shape

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array) -> jax.Array:
        heads = (self.shape.num_heads, self.shape.head)
        q = nn.DenseGeneral(heads, use_bias=False, name="query")(x)
        k = nn.DenseGeneral(heads, use_bias=False, name="key")(memory)
        v = nn.DenseGeneral(heads, use_bias=False, name="value")(memory)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(mixed)


class FeedForward(nn.Module):
    """Two matrices with a ReLU between."""

    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(nn.Dense(self.inner, use_bias=False, name="up")(x))
        return nn.Dense(x.shape[-1], use_bias=False, name="down")(y)


class T5(nn.Module):
    """Source [batch, source] and target [batch, target] tokens to logits of the target."""

    shape: T5Shape

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        s = self.shape
        embed = nn.Embed(s.vocab, s.hidden, name="embed")
        padding = jnp.where(source == 0, -1e9, 0.0)[:, None, None, :]

        x = embed(source)
        bias = RelativeBias(s.num_heads, s.num_buckets, causal=False, name="encoder_bias")
        encoder_bias = bias(s.source, s.source) + padding
        for index in range(s.num_layers):
            y = nn.RMSNorm(name=f"encoder_norm_{index}a")(x)
            x = x + Attention(s, name=f"encoder_attention_{index}")(y, y, encoder_bias)
            y = nn.RMSNorm(name=f"encoder_norm_{index}b")(x)
            x = x + FeedForward(s.inner, name=f"encoder_inner_{index}")(y)
        memory = nn.RMSNorm(name="encoder_norm")(x)

        x = embed(target)
        bias = RelativeBias(s.num_heads, s.num_buckets, causal=True, name="decoder_bias")
        future = jnp.where(nn.make_causal_mask(target), 0.0, -1e9)
        decoder_bias = bias(s.target, s.target) + future
        for index in range(s.num_layers):
            y = nn.RMSNorm(name=f"decoder_norm_{index}a")(x)
            x = x + Attention(s, name=f"decoder_attention_{index}")(y, y, decoder_bias)
            y = nn.RMSNorm(name=f"decoder_norm_{index}b")(x)
            x = x + Attention(s, name=f"cross_attention_{index}")(y, memory, padding)
            y = nn.RMSNorm(name=f"decoder_norm_{index}c")(x)
            x = x + FeedForward(s.inner, name=f"decoder_inner_{index}")(y)
        x = nn.RMSNorm(name="decoder_norm")(x)
        return embed.attend(x * s.hidden**-0.5)


def build(size: str = "tiny") -> CorpusModel:
    """Return the T5 of `size` (the large one has the shape of T5-11B)."""
    return of_shape("t5", SHAPES[size], size)


def of_shape(name: str, shape: T5Shape, size: str = "large") -> CorpusModel:
    """Return the T5 of a shape."""
    network = T5(shape)

    def init(key: jax.Array) -> PyTree:
        source = jnp.zeros((1, shape.source), jnp.int32)
        target = jnp.zeros((1, shape.target), jnp.int32)
        return network.init(key, source, target)["params"]

    def make_batch(key: jax.Array) -> PyTree:
        source_key, target_key = jax.random.split(key)
        source = jax.random.randint(source_key, (shape.batch, shape.source), 0, shape.vocab)
        target = jax.random.randint(target_key, (shape.batch, shape.target), 0, shape.vocab)
        return {"source": source, "target": target}

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        target = batch["target"]
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        logits = network.apply({"params": params}, batch["source"], shifted)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        weight = (target != 0).astype(loss.dtype)
        return jnp.sum(loss * weight) / jnp.sum(weight)

    return deterministic_model(
        name=name,
        size=size,
        init=init,
        loss=loss,
        make_batch=make_batch,
        optimizer=optimiser(shape.optimiser)
        if shape.optimiser
        else optax.adafactor(3e-3, min_dim_size_to_factor=64),
    )
