"""A Swin transformer in plain JAX: attention in shifted windows, patches merged between stages."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from attrs import frozen
from numpy.typing import NDArray

from alpa_meta.corpus.images import labelled_images
from alpa_meta.corpus.model import CorpusModel, deterministic_model, optimiser
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class SwinShape:
    """Sizes of the network and of its batch: `depths[i]` blocks of width hidden x 2**i."""

    depths: tuple[int, ...]
    hidden: int
    head: int
    window: int
    image: int
    patch: int
    num_classes: int
    batch: int


def of_shape(name: str, shape: SwinShape) -> CorpusModel:
    """Return the Swin transformer of a shape (Liu et al., ICCV 2021)."""

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        logits = _logits(params, batch["images"], shape)
        losses: PyTree = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(losses)

    return deterministic_model(
        name=name,
        size="large",
        init=lambda key: _init(key, shape),
        loss=loss,
        make_batch=lambda key: labelled_images(key, shape.batch, shape.image, shape.num_classes),
        optimizer=optimiser("adamw"),
    )


def _weight(key: jax.Array, *dims: int) -> jax.Array:
    return 0.02 * jax.random.normal(key, dims)


def _init_norm(width: int) -> PyTree:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _init(key: jax.Array, shape: SwinShape) -> PyTree:
    patch_key, head_key, *stage_keys = jax.random.split(key, len(shape.depths) + 2)
    stages = []
    for number, (depth, stage_key) in enumerate(zip(shape.depths, stage_keys, strict=True)):
        width = shape.hidden * 2**number
        merge_key, *keys = jax.random.split(stage_key, depth + 1)
        stage: PyTree = {"blocks": [_init_block(k, width, shape) for k in keys]}
        if number:
            merge = _weight(merge_key, 2 * width, width)
            stage["merge"] = {"norm": _init_norm(2 * width), "weight": merge}
        stages.append(stage)
    return {
        "patches": _weight(patch_key, 3 * shape.patch**2, shape.hidden),
        "stages": stages,
        "norm": _init_norm(width),
        "head": _weight(head_key, width, shape.num_classes),
    }


def _init_block(key: jax.Array, width: int, shape: SwinShape) -> PyTree:
    keys = jax.random.split(key, 5)
    heads = width // shape.head
    return {
        "norm_1": _init_norm(width),
        "qkv": _weight(keys[0], 3, width, heads, shape.head),
        "bias": _weight(keys[1], (2 * shape.window - 1) ** 2, heads),
        "out": _weight(keys[2], heads, shape.head, width),
        "norm_2": _init_norm(width),
        "up": _weight(keys[3], width, 4 * width),
        "down": _weight(keys[4], 4 * width, width),
    }


def _norm(params: PyTree, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    y: jax.Array = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    return y


def _squares(x: jax.Array, size: int) -> jax.Array:
    """Return [batch, squares, size * size, width] of x [batch, height, height, width]."""
    batch, height, _, width = x.shape
    x = x.reshape(batch, height // size, size, height // size, size, width)
    return x.swapaxes(2, 3).reshape(batch, (height // size) ** 2, size**2, width)


def _merged(x: jax.Array, size: int) -> jax.Array:
    """Return x [batch, height, height, width] with each square of patches as one."""
    side = x.shape[1] // size
    return _squares(x, size).reshape(x.shape[0], side, side, -1)


def _image(squares: jax.Array, size: int) -> jax.Array:
    """Return [batch, height, height, width], what `_squares` was given."""
    batch, count, _, width = squares.shape
    side = math.isqrt(count)
    x = squares.reshape(batch, side, side, size, size, width).swapaxes(2, 3)
    return x.reshape(batch, side * size, side * size, width)


def _distances(window: int) -> NDArray[np.int64]:
    """Return [tokens, tokens]: the row of the bias table for two tokens of a window."""
    place = np.stack(np.meshgrid(*[np.arange(window)] * 2, indexing="ij"), -1).reshape(-1, 2)
    apart = place[:, None] - place[None] + window - 1
    rows: NDArray[np.int64] = apart[..., 0] * (2 * window - 1) + apart[..., 1]
    return rows


def _hidden_pairs(height: int, window: int, shift: int) -> NDArray[np.bool_]:
    """Return [squares, tokens, tokens]: pairs that only the shift has put into one window."""
    band = np.digitize(np.arange(height), [height - window, height - shift])
    region = 3 * band[:, None] + band[None, :]
    side = height // window
    squares = region.reshape(side, window, side, window).swapaxes(1, 2).reshape(side**2, -1)
    hidden: NDArray[np.bool_] = squares[:, :, None] != squares[:, None, :]
    return hidden


def _attention(params: PyTree, x: jax.Array, window: int, shift: int) -> jax.Array:
    if shift:
        hidden = jnp.asarray(_hidden_pairs(x.shape[1], window, shift))
        x = jnp.roll(x, (-shift, -shift), (1, 2))
    q, k, v = jnp.einsum("bnld,tdhk->tbnlhk", _squares(x, window), params["qkv"])
    scores = jnp.einsum("bnqhk,bnmhk->bnhqm", q, k) / math.sqrt(q.shape[-1])
    scores = scores + params["bias"][jnp.asarray(_distances(window))].transpose(2, 0, 1)
    if shift:
        scores = jnp.where(hidden[:, None], -1e9, scores)
    mixed = jnp.einsum("bnhqm,bnmhk->bnqhk", jax.nn.softmax(scores), v)
    x = _image(jnp.einsum("bnlhk,hkd->bnld", mixed, params["out"]), window)
    return jnp.roll(x, (shift, shift), (1, 2)) if shift else x


def _logits(params: PyTree, images: jax.Array, shape: SwinShape) -> jax.Array:
    """Return [batch, classes]."""
    x = _merged(images, shape.patch) @ params["patches"]
    for stage in params["stages"]:
        if "merge" in stage:
            x = _norm(stage["merge"]["norm"], _merged(x, 2)) @ stage["merge"]["weight"]
        window = min(shape.window, x.shape[1])
        for number, block in enumerate(stage["blocks"]):
            shift = window // 2 if number % 2 and window < x.shape[1] else 0
            x = x + _attention(block, _norm(block["norm_1"], x), window, shift)
            x = x + jax.nn.gelu(_norm(block["norm_2"], x) @ block["up"]) @ block["down"]
    logits: jax.Array = _norm(params["norm"], x).mean(axis=(1, 2)) @ params["head"]
    return logits
