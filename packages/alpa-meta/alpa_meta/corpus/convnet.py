"""A small convolutional network in plain JAX: max pooling, strides, a depthwise layer, SGD."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.images import labelled_images
from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class ConvNetShape:
    """Sizes of the network and of its batch."""

    channels: tuple[int, ...]
    image: int
    num_classes: int
    batch: int


SHAPES = {
    "tiny": ConvNetShape(channels=(16, 32), image=16, num_classes=16, batch=16),
    "small": ConvNetShape(channels=(64, 128, 256), image=64, num_classes=200, batch=256),
    "large": ConvNetShape(channels=(256, 512, 1024), image=256, num_classes=1024, batch=1024),
}


def build(size: str = "tiny") -> CorpusModel:
    """Return the convolutional network of `size`."""
    shape = SHAPES[size]

    def init(key: jax.Array) -> PyTree:
        head_key, *layer_keys = jax.random.split(key, len(shape.channels) + 1)
        fan_ins = (3, *shape.channels[:-1])
        layers = []
        for k, fan_in, channels in zip(layer_keys, fan_ins, shape.channels, strict=True):
            full_key, depth_key = jax.random.split(k)
            full = jax.random.normal(full_key, (3, 3, fan_in, channels)) * (9 * fan_in) ** -0.5
            depthwise = jax.random.normal(depth_key, (3, 3, 1, channels)) / 3
            layers.append({"full": full, "depthwise": depthwise, "bias": jnp.zeros(channels)})
        dims = (shape.channels[-1], shape.num_classes)
        return {"layers": layers, "head": 0.1 * jax.random.normal(head_key, dims)}

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["images"]
        for layer in params["layers"]:
            x = _convolve(x, layer["full"], groups=1) + layer["bias"]
            x = jax.nn.relu(_convolve(x, layer["depthwise"], groups=x.shape[-1]))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = x.mean(axis=(1, 2)) @ params["head"]
        losses: PyTree = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(losses)

    return deterministic_model(
        name="convnet",
        size=size,
        init=init,
        loss=loss,
        make_batch=lambda key: labelled_images(key, shape.batch, shape.image, shape.num_classes),
        optimizer=optax.sgd(0.05),
    )


def _convolve(x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
