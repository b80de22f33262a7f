"""Batches of random images."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_meta.corpus.model import Tree


def labelled_images(key: jax.Array, batch: int, image: int, num_classes: int) -> Tree:
    """Return `images` float32[batch, image, image, 3] and `labels` int32[batch]."""
    image_key, label_key = jax.random.split(key)
    return {
        "images": jax.random.normal(image_key, (batch, image, image, 3)),
        "labels": jax.random.randint(label_key, (batch,), 0, num_classes, jnp.int32),
    }
