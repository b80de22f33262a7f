"""A decoder-only transformer (GPT-2's architecture) in flax linen, AdamW, global-norm clipping."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.corpus.tokens import next_token_batch, next_token_loss
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class GPTShape:
    """Sizes of the network and of its batch."""

    num_layers: int
    hidden: int
    num_heads: int
    vocab: int
    length: int
    batch: int


SHAPES = {
    "tiny": GPTShape(num_layers=2, hidden=64, num_heads=8, vocab=128, length=16, batch=16),
    "small": GPTShape(num_layers=12, hidden=768, num_heads=12, vocab=50304, length=1024, batch=16),
    "large": GPTShape(num_layers=48, hidden=8192, num_heads=64, vocab=51200, length=1024, batch=64),
}


class Attention(nn.Module):
    """Causal self-attention: [batch, length, hidden] to the same."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        length, hidden = x.shape[-2:]
        heads = (self.num_heads, hidden // self.num_heads)
        q = nn.DenseGeneral(heads, name="query")(x)
        k = nn.DenseGeneral(heads, name="key")(x)
        v = nn.DenseGeneral(heads, name="value")(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(heads[1])
        visible = nn.make_causal_mask(jnp.ones((1, length)))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(hidden, axis=(-2, -1), name="out")(mixed)


class Block(nn.Module):
    """One pre-norm transformer block."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        x = x + Attention(self.num_heads, name="attention")(nn.LayerNorm(name="norm_1")(x))
        y = nn.Dense(4 * hidden, name="up")(nn.LayerNorm(name="norm_2")(x))
        return x + nn.Dense(hidden, name="down")(nn.gelu(y))


class GPT(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocab]."""

    shape: GPTShape

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.shape
        x = nn.Embed(s.vocab, s.hidden, name="embed")(tokens)
        x = x + nn.Embed(s.length, s.hidden, name="position")(jnp.arange(tokens.shape[1]))
        for index in range(s.num_layers):
            x = Block(s.num_heads, name=f"block_{index}")(x)
        return nn.Dense(s.vocab, use_bias=False, name="head")(nn.LayerNorm(name="norm")(x))


def build(size: str = "tiny") -> CorpusModel:
    """Return the GPT of `size`."""
    shape = SHAPES[size]
    network = GPT(shape)

    def init(key: jax.Array) -> PyTree:
        return network.init(key, jnp.zeros((1, shape.length), jnp.int32))["params"]

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        logits: PyTree = network.apply({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["labels"])

    return deterministic_model(
        name="gpt",
        size=size,
        init=init,
        loss=loss,
        make_batch=lambda key: next_token_batch(key, shape.batch, shape.length, shape.vocab),
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 3e-3, 100, 1000)),
        ),
    )
