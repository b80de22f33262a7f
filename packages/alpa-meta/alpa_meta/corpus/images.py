"""Batches of random images, and the training step of networks that keep statistics of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from alpa_meta.corpus.model import CorpusModel
from alpa_meta.types import PyTree

if TYPE_CHECKING:
    import flax.linen as nn
    import optax


def labelled_images(key: jax.Array, batch: int, image: int, num_classes: int) -> PyTree:
    """Return `images` float32[batch, image, image, 3] and `labels` int32[batch]."""
    image_key, label_key = jax.random.split(key)
    return {
        "images": jax.random.normal(image_key, (batch, image, image, 3)),
        "labels": jax.random.randint(label_key, (batch,), 0, num_classes, jnp.int32),
    }


def statistics_model(
    *,
    name: str,
    size: str,
    network: nn.Module,
    batch: int,
    image: int,
    num_classes: int,
    optimizer: optax.GradientTransformation,
) -> CorpusModel:
    """Return the classifier that trains `network` with its BatchNorm statistics in the state."""
    import optax

    def make_state(key: jax.Array) -> PyTree:
        variables = network.init(key, jnp.zeros((1, image, image, 3)))
        return {
            "params": variables["params"],
            "batch_stats": variables["batch_stats"],
            "opt_state": optimizer.init(variables["params"]),
        }

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, changed = network.apply(variables, batch["images"], mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
            return loss, (logits, changed["batch_stats"])

        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, batch_stats)), gradients = gradient(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["labels"])
        state = {"params": params, "batch_stats": batch_stats, "opt_state": opt_state}
        return state, {"loss": loss, "accuracy": accuracy}

    return CorpusModel(
        name=name,
        size=size,
        train_step=train_step,
        make_state=make_state,
        make_batch=lambda key: labelled_images(key, batch, image, num_classes),
    )
