"""The loss on held-out text, of a model and of the trigram baseline on the same bytes."""

from __future__ import annotations

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from alpa_meta.trainer.model import Gpt, GptOptions
from alpa_meta.trainer.text import Text, spaced_windows
from alpa_meta.trainer.trigram import trigram_counts, trigram_loss
from alpa_meta.types import PyTree

HELD_OUT_BYTES = 1 << 16
WINDOWS_AT_ONCE = 32


def held_out_loss(model: GptOptions, params: PyTree, text: Text) -> float:
    """Return the mean loss, nats per byte, of `params` on the held-out text, on one device."""
    gpt = Gpt(model)

    @jax.jit
    def loss_of(params: PyTree, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = gpt.apply({"params": params}, inputs)
        loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return loss

    windows, _ = _held_out_windows(model, text)
    values = windows.astype(np.int32)
    losses = [
        float(
            loss_of(
                params,
                values[at : at + WINDOWS_AT_ONCE, :-1],
                values[at : at + WINDOWS_AT_ONCE, 1:],
            )
        )
        for at in range(0, len(values), WINDOWS_AT_ONCE)
    ]
    return float(np.mean(losses))


def baseline_loss(model: GptOptions, text: Text) -> float:
    """Return the loss, nats per byte, of the trigram fitted on the training text."""
    _, starts = _held_out_windows(model, text)
    return trigram_loss(trigram_counts(text.train), text.held_out, starts, model.context)


def _held_out_windows(model: GptOptions, text: Text) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return windows of about HELD_OUT_BYTES in all, a multiple of WINDOWS_AT_ONCE of them."""
    num_windows = max(1, HELD_OUT_BYTES // model.context // WINDOWS_AT_ONCE) * WINDOWS_AT_ONCE
    return spaced_windows(text.held_out, num_windows=num_windows, length=model.context)
