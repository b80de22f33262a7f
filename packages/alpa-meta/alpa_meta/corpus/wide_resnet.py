"""A Wide-ResNet in flax linen: BatchNorm statistics in the state, Nesterov momentum."""

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
class WideResNetShape:
    """Sizes of the network and of its batch: `blocks[i]` residual blocks in group i."""

    blocks: tuple[int, ...]
    base: int
    width: int
    image: int
    num_classes: int
    batch: int


SHAPES = {
    "tiny": WideResNetShape(blocks=(1, 1), base=8, width=1, image=16, num_classes=16, batch=16),
    "small": WideResNetShape(
        blocks=(4, 4, 4), base=16, width=10, image=32, num_classes=100, batch=128
    ),
    "large": WideResNetShape(
        blocks=(6, 8, 4, 6), base=448, width=2, image=224, num_classes=1024, batch=1536
    ),
}


class Block(nn.Module):
    """Pre-activation residual block: [batch, height, width, channels]."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        conv = partial(nn.Conv, features=self.channels, kernel_size=(3, 3), use_bias=False)
        strides = (self.stride, self.stride)
        y = jax.nn.relu(norm(name="norm_1")(x))
        short = x
        if x.shape[-1] != self.channels or self.stride != 1:
            short = nn.Conv(self.channels, (1, 1), strides, use_bias=False, name="short")(y)
        y = conv(strides=strides, name="conv_1")(y)
        y = conv(name="conv_2")(jax.nn.relu(norm(name="norm_2")(y)))
        return short + y


class WideResNet(nn.Module):
    """Images [batch, image, image, 3] to logits [batch, classes]."""

    shape: WideResNetShape

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        s = self.shape
        x = nn.Conv(s.base, (3, 3), use_bias=False, name="stem")(images)
        if s.image >= 224:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for group, num_blocks in enumerate(s.blocks):
            for index in range(num_blocks):
                stride = 2 if group > 0 and index == 0 else 1
                channels = s.base * s.width * 2**group
                x = Block(channels, stride, name=f"block_{group}_{index}")(x)
        x = jax.nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x))
        return nn.Dense(s.num_classes, name="head")(x.mean(axis=(1, 2)))


def build(size: str = "tiny") -> CorpusModel:
    """Return the Wide-ResNet of `size`."""
    shape = SHAPES[size]
    return statistics_model(
        name="wide-resnet",
        size=size,
        network=WideResNet(shape),
        batch=shape.batch,
        image=shape.image,
        num_classes=shape.num_classes,
        optimizer=optax.chain(
            optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9, nesterov=True)
        ),
    )
