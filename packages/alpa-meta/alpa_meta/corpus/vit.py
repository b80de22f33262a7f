"""A vision transformer in flax nnx: patches by a strided convolution, a class token, AdamW."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from attrs import frozen
from flax import nnx

from alpa_meta.corpus.images import labelled_images
from alpa_meta.corpus.model import CorpusModel, deterministic_model
from alpa_meta.types import PyTree


@frozen(kw_only=True)
class ViTShape:
    """Sizes of the network and of its batch; images are square with 3 channels."""

    num_layers: int
    hidden: int
    num_heads: int
    image: int
    patch: int
    num_classes: int
    batch: int


SHAPES = {
    "tiny": ViTShape(
        num_layers=2, hidden=64, num_heads=8, image=16, patch=4, num_classes=16, batch=16
    ),
    "small": ViTShape(
        num_layers=12, hidden=768, num_heads=12, image=224, patch=16, num_classes=1000, batch=64
    ),
    "large": ViTShape(
        num_layers=48, hidden=1664, num_heads=16, image=224, patch=14, num_classes=1000, batch=1024
    ),
}


class Block(nnx.Module):
    """One pre-norm encoder block."""

    def __init__(self, shape: ViTShape, rngs: nnx.Rngs) -> None:
        hidden = shape.hidden
        self.num_heads = shape.num_heads
        self.norm_1 = nnx.LayerNorm(hidden, rngs=rngs)
        self.qkv = nnx.Linear(hidden, 3 * hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(hidden, rngs=rngs)
        self.up = nnx.Linear(hidden, 4 * hidden, rngs=rngs)
        self.down = nnx.Linear(4 * hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm_1(x)).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v)
        x = x + self.out(mixed.reshape(batch, length, hidden))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class ViT(nnx.Module):
    """Images [batch, image, image, 3] to logits [batch, classes]."""

    def __init__(self, shape: ViTShape, rngs: nnx.Rngs) -> None:
        num_patches = (shape.image // shape.patch) ** 2
        window = (shape.patch, shape.patch)
        self.patches = nnx.Conv(3, shape.hidden, window, strides=window, padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, 1, shape.hidden)))
        position = nnx.initializers.normal(0.02)(rngs.params(), (1, num_patches + 1, shape.hidden))
        self.position = nnx.Param(position)
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.num_layers)])
        self.norm = nnx.LayerNorm(shape.hidden, rngs=rngs)
        self.head = nnx.Linear(shape.hidden, shape.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build(size: str = "tiny") -> CorpusModel:
    """Return the vision transformer of `size` (the large one has the shape of ViT-G/14)."""
    return of_shape("vit", SHAPES[size], size)


def of_shape(name: str, shape: ViTShape, size: str = "large") -> CorpusModel:
    """Return the vision transformer of a shape."""
    definition, _ = nnx.split(nnx.eval_shape(lambda: ViT(shape, nnx.Rngs(0))))

    def init(key: jax.Array) -> PyTree:
        return nnx.split(ViT(shape, nnx.Rngs(key)), nnx.Param)[1]

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        logits = nnx.merge(definition, params)(batch["images"])
        one_hot = optax.smooth_labels(jax.nn.one_hot(batch["labels"], shape.num_classes), 0.1)
        losses: PyTree = optax.softmax_cross_entropy(logits, one_hot)
        return jnp.mean(losses)

    return deterministic_model(
        name=name,
        size=size,
        init=init,
        loss=loss,
        make_batch=lambda key: labelled_images(key, shape.batch, shape.image, shape.num_classes),
        optimizer=optax.adamw(1e-3),
    )
