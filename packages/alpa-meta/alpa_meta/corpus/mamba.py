"""A selective state-space model (Mamba) in plain JAX: depthwise convolution, input-dependent scan.

`scan="associative"` evaluates the recurrence h[t] = a[t] h[t-1] + b[t] by `lax.associative_scan`,
`scan="sequential"` by `lax.scan`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.corpus.tokens import next_token_batch, next_token_loss
from alpa_meta.types import PyTree

WINDOW = 4


@frozen(kw_only=True)
class MambaShape:
    """Sizes of the network and of its batch; the inner width is twice the hidden one."""

    num_layers: int
    hidden: int
    num_states: int
    rank: int
    vocab: int
    length: int
    batch: int


SHAPES = {
    "tiny": MambaShape(
        num_layers=2, hidden=32, num_states=8, rank=8, vocab=128, length=16, batch=16
    ),
    "small": MambaShape(
        num_layers=24, hidden=768, num_states=16, rank=48, vocab=50280, length=2048, batch=16
    ),
    "large": MambaShape(
        num_layers=64, hidden=2560, num_states=16, rank=160, vocab=50280, length=2048, batch=256
    ),
}


def build(
    size: str = "tiny", *, scan: Literal["associative", "sequential"] = "associative"
) -> CorpusModel:
    """Return the Mamba of `size` (Gu and Dao, section 3; the large one has 2.8B parameters)."""
    shape = SHAPES[size]
    recurrence = _by_associative_scan if scan == "associative" else _by_sequential_scan

    def block(params: PyTree, x: jax.Array) -> jax.Array:
        inner, gate = jnp.split(x @ params["in"], 2, axis=-1)
        inner = jax.lax.conv_general_dilated(
            inner,
            params["window"],
            window_strides=(1,),
            padding=[(WINDOW - 1, 0)],
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=inner.shape[-1],
        )
        inner = jax.nn.silu(inner)
        projected = inner @ params["select"]
        low, into, out_of = jnp.split(
            projected, [shape.rank, shape.rank + shape.num_states], axis=-1
        )
        step = jax.nn.softplus(low @ params["step"] + params["step_bias"])
        decay = jnp.exp(step[..., None] * -jnp.exp(params["log_rate"]))
        drive = (step * inner)[..., None] * into[..., None, :]
        mixed = jnp.einsum("blds,bls->bld", recurrence(decay, drive), out_of)
        mixed = (mixed + inner * params["skip"]) * jax.nn.silu(gate)
        outputs: jax.Array = mixed @ params["out"]
        return outputs

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + block(layer, _norm(layer["norm"], x))
        logits = _norm(params["norm"], x) @ params["embed"].T
        return next_token_loss(logits, batch["labels"])

    return deterministic_model(
        name="mamba" if scan == "associative" else "mamba-sequential",
        size=size,
        init=lambda key: _init(key, shape),
        loss=loss,
        make_batch=lambda key: next_token_batch(key, shape.batch, shape.length, shape.vocab),
        optimizer=optax.adamw(1e-3),
    )


def _init(key: jax.Array, shape: MambaShape) -> PyTree:
    embed_key, *layer_keys = jax.random.split(key, shape.num_layers + 1)
    hidden, inner = shape.hidden, 2 * shape.hidden
    rates = jnp.arange(1, shape.num_states + 1, dtype=jnp.float32)

    def layer(key: jax.Array) -> PyTree:
        in_key, window_key, select_key, step_key, out_key = jax.random.split(key, 5)
        selected = shape.rank + 2 * shape.num_states
        return {
            "norm": jnp.ones(hidden),
            "in": hidden**-0.5 * jax.random.normal(in_key, (hidden, 2 * inner)),
            "window": 0.5 * jax.random.normal(window_key, (WINDOW, 1, inner)),
            "select": inner**-0.5 * jax.random.normal(select_key, (inner, selected)),
            "step": shape.rank**-0.5 * jax.random.normal(step_key, (shape.rank, inner)),
            "step_bias": jnp.full(inner, -4.6),
            "log_rate": jnp.log(jnp.broadcast_to(rates, (inner, shape.num_states))),
            "skip": jnp.ones(inner),
            "out": inner**-0.5 * jax.random.normal(out_key, (inner, hidden)),
        }

    return {
        "embed": 0.02 * jax.random.normal(embed_key, (shape.vocab, hidden)),
        "layers": [layer(k) for k in layer_keys],
        "norm": jnp.ones(hidden),
    }


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def _by_associative_scan(decay: jax.Array, drive: jax.Array) -> jax.Array:
    """Return all states [batch, length, inner, states] of the recurrence."""

    def combine(
        left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    states: jax.Array = jax.lax.associative_scan(combine, (decay, drive), axis=1)[1]
    return states


def _by_sequential_scan(decay: jax.Array, drive: jax.Array) -> jax.Array:
    """Return all states [batch, length, inner, states] of the recurrence."""

    def advance(
        state: jax.Array, inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        state = inputs[0] * state + inputs[1]
        return state, state

    by_time = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(drive, 1, 0))
    _, states = jax.lax.scan(advance, jnp.zeros_like(drive[:, 0]), by_time)
    return jnp.moveaxis(states, 0, 1)
