"""Batches of tokens and the loss of predicting them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_meta.types import PyTree


def next_token_batch(key: jax.Array, batch: int, length: int, vocab: int) -> PyTree:
    """Return random `tokens` and the next token of each as `labels`, both int32[batch, length]."""
    sequence = jax.random.randint(key, (batch, length + 1), 0, vocab, jnp.int32)
    return {"tokens": sequence[:, :-1], "labels": sequence[:, 1:]}


def next_token_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return mean cross-entropy in nats: logits [batch, length, vocab], labels [batch, length]."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)
    return -jnp.mean(picked)
