"""The bundled model: a byte-level GPT, a decoder-only transformer in flax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from attrs import field, frozen
from attrs.validators import ge, in_

from alpa_meta.extras import named

try:
    import flax.linen as nn
    import optax  # noqa: F401  (the optimiser's, in `trainer.step`)
except ModuleNotFoundError as error:
    raise named(error, "alpa_meta.trainer") from None

DTYPES = ("float32", "bfloat16")


@frozen(kw_only=True)
class GptOptions:
    """Size of the model. `dtype` is that of the arithmetic; parameters are always float32."""

    num_layers: int = field(default=4, validator=ge(1))
    hidden: int = field(default=64, validator=ge(1))
    num_heads: int = field(default=4, validator=ge(1))
    context: int = field(default=128, validator=ge(1))
    vocabulary: int = field(default=256, validator=ge(2))
    dtype: str = field(default="float32", validator=in_(DTYPES))

    def __attrs_post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(
                f"hidden must be divisible by num_heads, got hidden={self.hidden} and "
                f"num_heads={self.num_heads}; choose a multiple"
            )


def attention_bias(num_heads: int, length: int) -> jax.Array:
    """Return what is added to attention scores: float32 [head, query position, key position].

    Minus infinity (a large finite number) for keys after the query, otherwise minus the distance
    times the slope of the head, 2^(-8 head / num_heads): ALiBi, Press et al., ICLR 2022, section 3.
    It needs no position parameters, and a byte model learns what follows what within few steps.
    """
    slopes = 2.0 ** (-8.0 * jnp.arange(num_heads, dtype=jnp.float32) / num_heads)
    position = jnp.arange(length)
    distance = position[:, None] - position[None, :]
    bias = -slopes[:, None, None] * distance.astype(jnp.float32)
    return jnp.where(distance >= 0, bias, -1e9)


class Attention(nn.Module):
    """Causal self-attention: [batch, position, hidden] to the same."""

    options: GptOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, heads = jnp.dtype(self.options.dtype), self.options.num_heads
        size = self.options.hidden // heads
        query, key, value = (
            nn.DenseGeneral((heads, size), use_bias=False, dtype=dtype, name=name)(x)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(size).astype(dtype)
        scores = scores.astype(jnp.float32) + attention_bias(heads, x.shape[1])
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(
            self.options.hidden, axis=(-2, -1), use_bias=False, dtype=dtype, name="out"
        )(mixed)


class Block(nn.Module):
    """One transformer layer: [batch, position, hidden] to the same."""

    options: GptOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, hidden = jnp.dtype(self.options.dtype), self.options.hidden
        x = x + Attention(self.options, name="attention")(nn.RMSNorm(dtype=dtype)(x))
        wide = nn.Dense(4 * hidden, use_bias=False, dtype=dtype, name="up")(
            nn.RMSNorm(dtype=dtype)(x)
        )
        return x + nn.Dense(hidden, use_bias=False, dtype=dtype, name="down")(nn.gelu(wide))


class Gpt(nn.Module):
    """Bytes [batch, position] to logits of the byte after each: float32 [batch, position, 256]."""

    options: GptOptions

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        options, dtype = self.options, jnp.dtype(self.options.dtype)
        x = nn.Embed(options.vocabulary, options.hidden, dtype=dtype, name="embedding")(tokens)
        for layer in range(options.num_layers):
            x = Block(options, name=f"layer_{layer}")(x)
        x = nn.RMSNorm(dtype=dtype, name="norm")(x)
        logits = nn.Dense(options.vocabulary, use_bias=False, dtype=dtype, name="head")(x)
        return logits.astype(jnp.float32)
