"""A wide ResNet of bottleneck blocks in flax linen, as Alpa trains it: BatchNorm, momentum."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.images import statistics_model
from alpa_meta.corpus.model import CorpusModel


@frozen(kw_only=True)
class BottleneckResNetShape:
    """Sizes of the network and of its batch: `blocks[i]` blocks in group i, `width` times the
    channels in their middle."""

    blocks: tuple[int, ...]
    base: int
    width: int
    image: int
    num_classes: int
    batch: int


class Block(nn.Module):
    """Residual block of a 1 x 1, a 3 x 3 and a 1 x 1 convolution."""

    channels: int
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        conv = partial(nn.Conv, use_bias=False)
        strides = (self.stride, self.stride)
        y = jax.nn.relu(norm(name="norm_1")(conv(self.channels, (1, 1), name="conv_1")(x)))
        y = conv(self.channels * self.width, (3, 3), strides, name="conv_2")(y)
        y = conv(self.channels * 4, (1, 1), name="conv_3")(jax.nn.relu(norm(name="norm_2")(y)))
        y = norm(name="norm_3")(y)
        if x.shape != y.shape:
            x = norm(name="short_norm")(conv(self.channels * 4, (1, 1), strides, name="short")(x))
        return jax.nn.relu(x + y)


class BottleneckResNet(nn.Module):
    """Images [batch, image, image, 3] to logits [batch, classes]."""

    shape: BottleneckResNetShape

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        s = self.shape
        x = nn.Conv(s.base, (7, 7), (2, 2), use_bias=False, name="stem")(images)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)
        window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, window, strides, "SAME")
        for group, num_blocks in enumerate(s.blocks):
            for index in range(num_blocks):
                stride = 2 if group > 0 and index == 0 else 1
                x = Block(s.base * 2**group, s.width, stride, name=f"block_{group}_{index}")(x)
        return nn.Dense(s.num_classes, name="head")(x.mean(axis=(1, 2)))


def of_shape(name: str, shape: BottleneckResNetShape) -> CorpusModel:
    """Return the network of a shape."""
    return statistics_model(
        name=name,
        size="large",
        network=BottleneckResNet(shape),
        batch=shape.batch,
        image=shape.image,
        num_classes=shape.num_classes,
        optimizer=optax.sgd(0.1, momentum=0.9, nesterov=True),
    )
