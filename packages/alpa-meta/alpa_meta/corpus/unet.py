"""A U-Net in flax linen: GroupNorm, transposed convolutions, attention at the lowest level."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from attrs import frozen

from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class UNetShape:
    """Sizes of the network and of its batch: `channels[i]` at 1/2**i of the resolution."""

    channels: tuple[int, ...]
    num_groups: int
    num_heads: int
    image: int
    image_channels: int
    batch: int


SHAPES = {
    "tiny": UNetShape(
        channels=(16, 32), num_groups=8, num_heads=8, image=16, image_channels=8, batch=16
    ),
    "small": UNetShape(
        channels=(128, 256, 256, 512),
        num_groups=32,
        num_heads=8,
        image=64,
        image_channels=4,
        batch=32,
    ),
    "large": UNetShape(
        channels=(320, 640, 1280, 1280),
        num_groups=32,
        num_heads=20,
        image=128,
        image_channels=4,
        batch=256,
    ),
}


class ResidualBlock(nn.Module):
    """Two convolutions with GroupNorm, shifted by a time embedding [batch, features] or None."""

    channels: int
    num_groups: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array | None) -> jax.Array:
        y = nn.silu(nn.GroupNorm(self.num_groups, name="norm_1")(x))
        y = nn.Conv(self.channels, (3, 3), name="conv_1")(y)
        if time is not None:
            y = y + nn.Dense(self.channels, name="time")(nn.silu(time))[:, None, None, :]
        y = nn.silu(nn.GroupNorm(self.num_groups, name="norm_2")(y))
        y = nn.Conv(self.channels, (3, 3), name="conv_2")(y)
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), name="short")(x)
        return x + y


class SpatialAttention(nn.Module):
    """Self-attention over all pixels: [batch, height, width, channels] to the same."""

    num_groups: int
    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, height, width, channels = x.shape
        y = nn.GroupNorm(self.num_groups, name="norm")(x).reshape(batch, height * width, channels)
        qkv = nn.DenseGeneral((3, self.num_heads, channels // self.num_heads), name="qkv")(y)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        y = nn.DenseGeneral(channels, axis=(-2, -1), name="out")(mixed)
        return x + y.reshape(x.shape)


class UNet(nn.Module):
    """Images [batch, image, image, channels] to the same, given `time` [batch, features]."""

    shape: UNetShape

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array | None = None) -> jax.Array:
        s = self.shape
        skips = []
        x = nn.Conv(s.channels[0], (3, 3), name="stem")(x)
        for level, channels in enumerate(s.channels[:-1]):
            x = ResidualBlock(channels, s.num_groups, name=f"down_{level}")(x, time)
            skips.append(x)
            x = nn.Conv(s.channels[level + 1], (3, 3), (2, 2), name=f"halve_{level}")(x)
        x = ResidualBlock(s.channels[-1], s.num_groups, name="middle_1")(x, time)
        x = SpatialAttention(s.num_groups, s.num_heads, name="attention")(x)
        x = ResidualBlock(s.channels[-1], s.num_groups, name="middle_2")(x, time)
        for level, channels in reversed(list(enumerate(s.channels[:-1]))):
            x = nn.ConvTranspose(channels, (2, 2), (2, 2), name=f"double_{level}")(x)
            x = jnp.concatenate([x, skips[level]], axis=-1)
            x = ResidualBlock(channels, s.num_groups, name=f"up_{level}")(x, time)
        x = nn.silu(nn.GroupNorm(s.num_groups, name="norm")(x))
        return nn.Conv(s.image_channels, (3, 3), name="head")(x)


def build(size: str = "tiny") -> CorpusModel:
    """Return the U-Net of `size`, trained to map images to images."""
    shape = SHAPES[size]
    network = UNet(shape)
    dims = (shape.batch, shape.image, shape.image, shape.image_channels)

    def init(key: jax.Array) -> PyTree:
        return network.init(key, jnp.zeros((1, *dims[1:])))["params"]

    def make_batch(key: jax.Array) -> PyTree:
        image_key, target_key = jax.random.split(key)
        return {
            "images": jax.random.normal(image_key, dims),
            "targets": jax.random.normal(target_key, dims),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        output = network.apply({"params": params}, batch["images"])
        return jnp.mean(jnp.square(output - batch["targets"]))

    return deterministic_model(
        name="unet",
        size=size,
        init=init,
        loss=loss,
        make_batch=make_batch,
        optimizer=optax.adam(1e-3),
    )
