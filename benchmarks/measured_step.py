"""The training step of a transformer as the programs of measured runs write it, in plain JAX.

    weights       in half precision, beside an optimiser (Adam) with copies in single precision
    products      queries, keys and values in one, and so gate and up of a gated network
    activations   pinned to the axis of tensor parallelism as Megatron-LM divides them: heads, inner
                  widths and logits over it, the residual stream whole or along the sequence
    residuals     what PyTorch's kernels keep for the backward pass, in half precision: the input of
                  a norm and of an activation, the result of a softmax
    dropout       of scores a kernel of its own (which elements it drops does not matter here)
    recomputation a part of the forward pass run whole once more (`_redone`); a planner's own leaves
                  out products that no gradient reads, as that which ends a layer

The models of `alpa_meta.corpus` are written as JAX users do: weights in single precision, cast on
use for every microbatch, and products apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from attrs import frozen

from alpa_meta import pin
from alpa_meta.corpus.tokens import next_token_batch, next_token_loss
from alpa_meta.types import Spec

Tree = Any
RATE, MOMENTUM, SQUARES, DECAY = 1e-4, 0.9, 0.95, 0.1  # of Adam


@frozen(kw_only=True)
class StepShape:
    """Sizes of a network and its batch, and how its program divides and repeats what it does."""

    layers: int
    hidden: int
    heads: int
    groups: int  # of heads that share keys and values
    inner: int
    vocab: int
    length: int
    batch: int
    dtype: str
    gated: bool  # RMSNorm, rotated queries and keys, SwiGLU; else LayerNorm, biases, GELU
    data: str | None = None  # the mesh axis of data parallelism
    tensor: str | None = None  # that of tensor parallelism
    sequence: bool = False  # whether it cuts the residual stream along the sequence
    recompute: str = "none"  # of a layer: "selective", its attention, or "full"
    dropout: bool = False  # of attention and of what a layer adds to the residual stream

    @property
    def depth(self) -> int:
        """Return the width of a head."""
        return self.hidden // self.heads

    def cut(self, x: jax.Array, dim: int) -> jax.Array:
        """Return an activation [batch, ...] whose `dim` is cut over the axis of tensor
        parallelism."""
        if self.tensor is None:
            return x
        axes = [self.data, *[None] * (x.ndim - 1)]
        axes[dim] = self.tensor
        pinned: jax.Array = pin(x, tuple(axes))
        return pinned

    def stream(self, x: jax.Array) -> jax.Array:
        """Return the residual stream [batch, length, hidden] as layers hand it on."""
        return x if self.tensor is None else _pinned(x, self._stream, self._stream)

    def entering(self, x: jax.Array) -> jax.Array:
        """Return what products read whose results are cut: all of the stream."""
        return x if self.tensor is None else _pinned(x, (self.data,), self._stream)

    def leaving(self, x: jax.Array) -> jax.Array:
        """Return what products of cut operands add to the stream."""
        return x if self.tensor is None else _pinned(x, self._stream, (self.data,))

    @property
    def _stream(self) -> Spec:
        return (self.data, self.tensor if self.sequence else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _pinned(x: jax.Array, there: Spec, back: Spec) -> jax.Array:
    """Return `x` as pinned `there`, whose gradient is pinned as `back`."""
    pinned: jax.Array = pin(x, there)
    return pinned


def _pinned_there(x: jax.Array, there: Spec, back: Spec) -> tuple[jax.Array, None]:
    return _pinned(x, there, back), None


def _pinned_back(there: Spec, back: Spec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (pin(gradient, back),)


_pinned.defvjp(_pinned_there, _pinned_back)


def measured_step(
    shape: StepShape,
) -> tuple[Callable[[Tree, Tree], tuple[Tree, Tree]], tuple[Tree, Tree]]:
    """Return a training step and the shapes of what it takes, a state and a batch."""

    def loss(weights: Tree, batch: Tree) -> jax.Array:
        return next_token_loss(_logits(weights, batch["tokens"], shape), batch["labels"])

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, gradients = jax.value_and_grad(loss)(state["weights"], batch)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        count = state["count"] + 1
        mean = jax.tree.map(
            lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, state["mean"], gradients
        )
        square = jax.tree.map(
            lambda v, g: SQUARES * v + (1 - SQUARES) * g * g, state["square"], gradients
        )

        def updated(master: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            scaled = m / (1 - MOMENTUM**count) / (jnp.sqrt(v / (1 - SQUARES**count)) + 1e-8)
            new: jax.Array = master - RATE * (scaled + DECAY * master)
            return new

        master = jax.tree.map(updated, state["master"], mean, square)
        weights = jax.tree.map(lambda w: w.astype(shape.dtype), master)
        made = {"weights": weights, "master": master, "mean": mean, "square": square}
        return made | {"count": count}, {"loss": value}

    def make(key: jax.Array) -> tuple[Tree, Tree]:
        master = _weights(shape)
        half = jax.tree.map(lambda w: w.astype(shape.dtype), master)
        zeros = jax.tree.map(jnp.zeros_like, master)
        state = {"weights": half, "master": master, "mean": zeros, "square": zeros}
        batch = next_token_batch(key, shape.batch, shape.length, shape.vocab)
        return state | {"count": jnp.zeros((), jnp.float32)}, batch

    return step, jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))


def _weights(shape: StepShape) -> Tree:
    hidden, inner, heads, depth = shape.hidden, shape.inner, shape.heads, shape.depth
    norm = {"scale": jnp.ones(hidden)} | ({} if shape.gated else {"bias": jnp.zeros(hidden)})
    layer: Tree = {"norm_1": norm, "norm_2": norm, "out": jnp.zeros((heads, depth, hidden))}
    if shape.gated:
        each = heads // shape.groups + 2
        layer["qkv"] = jnp.zeros((hidden, shape.groups, each, depth))
        layer["up"] = jnp.zeros((hidden, 2, inner))
    else:
        layer["qkv"] = jnp.zeros((hidden, 3, heads, depth))
        layer["up"] = jnp.zeros((hidden, inner))
        layer["biases"] = {
            "qkv": jnp.zeros((3, heads, depth)),
            "out": jnp.zeros(hidden),
            "up": jnp.zeros(inner),
            "down": jnp.zeros(hidden),
        }
    layer["down"] = jnp.zeros((inner, hidden))
    ends: Tree = {"embed": jnp.zeros((shape.vocab, hidden)), "norm": norm}
    if not shape.gated:
        ends["position"] = jnp.zeros((shape.length, hidden))
    return {
        "layers": [layer] * shape.layers,
        "head": jnp.zeros((hidden, shape.vocab)),
        **ends,
    }


def _norm(weights: Tree, x: jax.Array, shape: StepShape) -> jax.Array:
    return _normed(x, weights["scale"], weights.get("bias"))


@jax.custom_vjp
def _normed(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return x [..., hidden] normed: LayerNorm, without a bias RMSNorm."""
    return _normed_and_statistics(x, scale, bias)[0]


def _normed_and_statistics(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Tree]:
    wide = x.astype(jnp.float32)
    mean = jnp.float32(0) if bias is None else wide.mean(-1, keepdims=True)
    rate = jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), -1, keepdims=True) + 1e-5)
    wide = (wide - mean) * rate * scale
    y = wide if bias is None else wide + bias
    return y.astype(x.dtype), (x, scale, bias, mean, rate)


def _norm_backward(held: Tree, gradient: jax.Array) -> tuple[Tree, ...]:
    x, scale, bias, mean, rate = held
    wide = gradient.astype(jnp.float32)
    normed = (x.astype(jnp.float32) - mean) * rate
    all_but_last = tuple(range(x.ndim - 1))
    of_scale = (wide * normed).sum(all_but_last).astype(scale.dtype)
    of_bias = None if bias is None else wide.sum(all_but_last).astype(bias.dtype)
    wide = wide * scale
    of_x = wide - normed * jnp.mean(wide * normed, -1, keepdims=True)
    if bias is not None:
        of_x = of_x - wide.mean(-1, keepdims=True)
    return (of_x * rate).astype(x.dtype), of_scale, of_bias


_normed.defvjp(_normed_and_statistics, _norm_backward)


@jax.custom_vjp
def _shares(scores: jax.Array) -> jax.Array:
    """Return the softmax of causal scores [..., length, length]."""
    position = jnp.arange(scores.shape[-1])
    masked = jnp.where(position[:, None] >= position, scores.astype(jnp.float32), -1e9)
    return jax.nn.softmax(masked, axis=-1).astype(scores.dtype)


def _shares_backward(shares: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide, of = gradient.astype(jnp.float32), shares.astype(jnp.float32)
    found = of * (wide - (wide * of).sum(-1, keepdims=True))
    return (found.astype(shares.dtype),)


_shares.defvjp(lambda scores: (_shares(scores),) * 2, _shares_backward)


@jax.custom_vjp
def _gelu(x: jax.Array) -> jax.Array:
    y: jax.Array = jax.nn.gelu(x)
    return y


_gelu.defvjp(lambda x: (_gelu(x), x), lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g))


@jax.custom_vjp
def _gate(both: jax.Array) -> jax.Array:
    """Return [batch, length, inner] of gates and values [batch, length, 2, inner]."""
    return jax.nn.silu(both[:, :, 0]) * both[:, :, 1]


def _gate_backward(both: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    found: tuple[jax.Array] = jax.vjp(_gate.fun, both)[1](gradient)
    return found


_gate.defvjp(lambda both: (_gate(both), both), _gate_backward)


def _rotated(x: jax.Array) -> jax.Array:
    """Return x [batch, length, heads, depth] rotated by position."""
    length, depth = x.shape[1], x.shape[-1]
    frequency = 10000.0 ** (-jnp.arange(0, depth, 2, dtype=jnp.float32) / depth)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    both = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return both.astype(x.dtype)


def _attention(weights: Tree, x: jax.Array, shape: StepShape) -> jax.Array:
    batch, length, _ = x.shape
    if shape.gated:
        made = shape.cut(jnp.einsum("bld,dgnk->blgnk", x, weights["qkv"]), 2)
        q, k, v = made[:, :, :, :-2], made[:, :, :, -2], made[:, :, :, -1]
        q = _rotated(q.reshape(batch, length, shape.heads, shape.depth))
        k = _rotated(k)
    else:
        made = shape.cut(jnp.einsum("bld,dnhk->blnhk", x, weights["qkv"]), 3)
        made = made + weights["biases"]["qkv"]
        q, k, v = made[:, :, 0], made[:, :, 1], made[:, :, 2]
    mix = functools.partial(_mixed, shape=shape)
    mixed = (_redone(mix) if shape.recompute == "selective" else mix)((), (q, k, v))
    out = shape.leaving(jnp.einsum("blhk,hkd->bld", mixed, weights["out"]))
    return out if shape.gated else out + weights["biases"]["out"]


def _mixed(_: Tree, of: Tree, shape: StepShape) -> jax.Array:
    """Return values [batch, length, heads, depth] mixed by queries and keys of the same shape but
    with fewer heads, where several share them."""
    q, k, v = of
    batch, length, groups, _ = k.shape
    q = q.reshape(batch, length, groups, shape.heads // groups, shape.depth)
    shares = _shares(jnp.einsum("bqhgk,bmhk->bhgqm", q / math.sqrt(shape.depth), k))
    if shape.dropout:
        shares = _dropped(jax.lax.optimization_barrier(shares))
    mixed = jnp.einsum("bhgqm,bmhk->bqhgk", shares, v)
    return mixed.reshape(batch, length, shape.heads, shape.depth)


def _feed_forward(weights: Tree, x: jax.Array, shape: StepShape) -> jax.Array:
    if shape.gated:
        both = shape.cut(jnp.einsum("bld,dnf->blnf", x, weights["up"]), 3)
        return shape.leaving(_gate(both) @ weights["down"])
    inner = shape.cut(x @ weights["up"], 2) + weights["biases"]["up"]
    made: jax.Array = shape.leaving(_gelu(inner) @ weights["down"])
    made = made + weights["biases"]["down"]
    return made


def _dropped(x: jax.Array) -> jax.Array:
    """Return `x` where it is kept, else 0: by its values, which the backward pass reads in place of
    a mask. These are as many bytes as a mask written once and read once."""
    kept: jax.Array = jnp.where(x > 0, x / 0.9, 0)
    return kept


def _redone(
    function: Callable[[Tree, Tree], jax.Array],
) -> Callable[[Tree, Tree], jax.Array]:
    """Return a function of weights and activations whose backward pass runs all of it once more,
    as PyTorch's checkpoints do; compilers leave out what no gradient reads."""
    run = jax.custom_vjp(function)

    def forward(weights: Tree, of: Tree) -> tuple[jax.Array, tuple[Tree, Tree]]:
        return function(weights, of), (weights, of)

    def backward(held: tuple[Tree, Tree], gradient: jax.Array) -> tuple[Tree, ...]:
        weights, of = held
        of, gradient = jax.lax.optimization_barrier((of, gradient))
        again, gradients_of = jax.vjp(function, weights, of)
        _, gradient = jax.lax.optimization_barrier((again, gradient))
        found: tuple[Tree, ...] = gradients_of(gradient)
        return found

    run.defvjp(forward, backward)
    return run


def _layer(weights: Tree, x: jax.Array, shape: StepShape) -> jax.Array:
    dropped = _dropped if shape.dropout else lambda x: x
    read = shape.entering(_norm(weights["norm_1"], x, shape))
    x = x + dropped(_attention(weights, read, shape))
    read = shape.entering(_norm(weights["norm_2"], x, shape))
    return x + dropped(_feed_forward(weights, read, shape))


@functools.partial(jax.jit, static_argnames="shape")
def _block(weights: Tree, x: jax.Array, shape: StepShape) -> jax.Array:
    """Return what a block makes of `x`; equal blocks are traced once."""
    layer = functools.partial(_layer, shape=shape)
    return (_redone(layer) if shape.recompute == "full" else layer)(weights, x)


def _logits(weights: Tree, tokens: jax.Array, shape: StepShape) -> jax.Array:
    """Return [batch, length, vocab] in the compute dtype."""
    x = weights["embed"][tokens]
    if not shape.gated:
        x = x + weights["position"]
    x = shape.stream(x)
    for layer in weights["layers"]:
        x = _block(layer, x, shape)
    return shape.cut(shape.entering(_norm(weights["norm"], x, shape)) @ weights["head"], 2)
