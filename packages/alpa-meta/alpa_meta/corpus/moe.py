"""A mixture-of-experts transformer block in plain JAX, top-2 routing, two ways to dispatch.

`sorts=False`: GShard's one-hot dispatch and combine tensors with a capacity per expert
(dropped tokens pass through). `sorts=True`: tokens sorted by expert and scattered into the
experts' slots, no one-hot tensor. Both add the load-balancing loss of GShard (section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.corpus.tokens import next_token_batch, next_token_loss
from alpa_meta.types import PyTree

TOP = 2


@frozen(kw_only=True)
class MoEShape:
    """Sizes of the network and of its batch; `capacity` is tokens per expert and sequence."""

    num_layers: int
    hidden: int
    num_heads: int
    inner: int
    num_experts: int
    capacity: int
    vocab: int
    length: int
    batch: int


SHAPES = {
    "tiny": MoEShape(
        num_layers=1,
        hidden=64,
        num_heads=8,
        inner=128,
        num_experts=8,
        capacity=8,
        vocab=128,
        length=16,
        batch=16,
    ),
    "small": MoEShape(
        num_layers=12,
        hidden=768,
        num_heads=12,
        inner=3072,
        num_experts=16,
        capacity=160,
        vocab=32000,
        length=1024,
        batch=32,
    ),
    "large": MoEShape(
        num_layers=32,
        hidden=4096,
        num_heads=32,
        inner=14336,
        num_experts=8,
        capacity=1280,
        vocab=32000,
        length=4096,
        batch=128,
    ),
}


def build(size: str = "tiny", *, sorts: bool = False) -> CorpusModel:
    """Return the mixture-of-experts model of `size` (the large one has Mixtral 8x7B's widths)."""
    shape = SHAPES[size]
    experts = _experts_by_sort if sorts else _experts_by_einsum

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        balance = jnp.zeros(())
        for layer in params["layers"]:
            x = x + _attention(layer, _norm(layer["norm_1"], x))
            y = _norm(layer["norm_2"], x)
            gates = jax.nn.softmax(y @ layer["router"])
            x = x + experts(layer, y, gates, shape)
            balance = balance + _balance_loss(gates, shape.num_experts)
        logits = _norm(params["norm"], x) @ params["head"]
        return next_token_loss(logits, batch["labels"]) + 0.01 * balance

    return deterministic_model(
        name="moe-sort" if sorts else "moe-einsum",
        size=size,
        init=lambda key: _init(key, shape),
        loss=loss,
        make_batch=lambda key: next_token_batch(key, shape.batch, shape.length, shape.vocab),
        optimizer=optax.adam(1e-3),
    )


def _init(key: jax.Array, shape: MoEShape) -> PyTree:
    embed_key, head_key, *layer_keys = jax.random.split(key, shape.num_layers + 2)
    hidden, head = shape.hidden, shape.hidden // shape.num_heads

    def layer(key: jax.Array) -> PyTree:
        qkv_key, out_key, router_key, up_key, down_key = jax.random.split(key, 5)
        return {
            "norm_1": jnp.ones(hidden),
            "qkv": 0.02 * jax.random.normal(qkv_key, (3, hidden, shape.num_heads, head)),
            "out": 0.02 * jax.random.normal(out_key, (shape.num_heads, head, hidden)),
            "norm_2": jnp.ones(hidden),
            "router": 0.02 * jax.random.normal(router_key, (hidden, shape.num_experts)),
            "up": 0.02 * jax.random.normal(up_key, (shape.num_experts, hidden, shape.inner)),
            "down": 0.02 * jax.random.normal(down_key, (shape.num_experts, shape.inner, hidden)),
        }

    return {
        "embed": 0.02 * jax.random.normal(embed_key, (shape.vocab, hidden)),
        "layers": [layer(k) for k in layer_keys],
        "norm": jnp.ones(hidden),
        "head": 0.02 * jax.random.normal(head_key, (hidden, shape.vocab)),
    }


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def _attention(params: PyTree, x: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bld,tdhk->tblhk", x, params["qkv"])
    scores = jnp.einsum("bqhk,bmhk->bhqm", q, k) / math.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9))
    return jnp.einsum("bhqm,bmhk,hkd->bqd", weights, v, params["out"])


def _balance_loss(gates: jax.Array, num_experts: int) -> jax.Array:
    """Return the scalar that is 1 when tokens and gate mass [batch, length, experts] are even."""
    first = jax.nn.one_hot(jnp.argmax(gates, -1), num_experts)
    return num_experts * jnp.mean(first.mean(1) * gates.mean(1)) * num_experts


def _experts_by_einsum(
    params: PyTree, x: jax.Array, gates: jax.Array, shape: MoEShape
) -> jax.Array:
    """Return the mixed expert outputs [batch, length, hidden] through one-hot tensors."""

    def run(inputs: jax.Array) -> jax.Array:
        inner = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, params["up"]))
        return jnp.einsum("ebcf,efd->ebcd", inner, params["down"])

    return through_experts(x, gates, shape.num_experts, shape.capacity, run)


def through_experts(
    x: jax.Array,
    gates: jax.Array,
    num_experts: int,
    capacity: int,
    run: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return what the two chosen experts of each token make of it: x [batch, length, hidden].

    `run` takes and returns [experts, batch, capacity, hidden]; `gates` [batch, length, experts].
    """
    chosen_gates, chosen = jax.lax.top_k(gates, TOP)
    chosen_gates = chosen_gates / chosen_gates.sum(-1, keepdims=True)
    filled = jnp.zeros((x.shape[0], 1, num_experts), jnp.int32)
    combine = jnp.zeros((*x.shape[:2], num_experts, capacity), x.dtype)
    for rank in range(TOP):
        expert = jax.nn.one_hot(chosen[..., rank], num_experts, dtype=jnp.int32)
        slot = jnp.sum((jnp.cumsum(expert, axis=1) - 1 + filled) * expert, axis=-1)
        filled = filled + expert.sum(axis=1, keepdims=True)
        slots = jax.nn.one_hot(slot, capacity, dtype=x.dtype)
        weight = chosen_gates[..., rank, None, None].astype(x.dtype)
        combine = combine + weight * expert[..., None].astype(x.dtype) * slots[:, :, None, :]
    dispatch = (combine > 0).astype(x.dtype)
    outputs = run(jnp.einsum("blec,bld->ebcd", dispatch, x))
    return jnp.einsum("blec,ebcd->bld", combine, outputs)


def _experts_by_sort(params: PyTree, x: jax.Array, gates: jax.Array, shape: MoEShape) -> jax.Array:
    """Return the mixed expert outputs [batch, length, hidden], sorting each sequence."""

    def sequence(x: jax.Array, gates: jax.Array) -> jax.Array:
        chosen_gates, chosen = jax.lax.top_k(gates, TOP)
        chosen_gates = chosen_gates / chosen_gates.sum(-1, keepdims=True)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        expert, token = expert[order], order // TOP
        first = jnp.searchsorted(expert, jnp.arange(shape.num_experts))
        slot = jnp.arange(expert.shape[0]) - first[expert]
        kept = slot < shape.capacity
        inputs = jnp.zeros((shape.num_experts, shape.capacity, x.shape[-1]))
        inputs = inputs.at[expert, slot].set(x[token], mode="drop")
        inner = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        outputs = jnp.einsum("ecf,efd->ecd", inner, params["down"])
        weight = jnp.where(kept, chosen_gates.reshape(-1)[order], 0.0)
        rows = outputs[expert, jnp.minimum(slot, shape.capacity - 1)] * weight[:, None]
        return jnp.zeros_like(x).at[token].add(rows)

    return jax.vmap(sequence)(x, gates)
