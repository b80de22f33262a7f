"""The baseline a trained model has to beat: a byte trigram model with add-one smoothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from alpa_meta.trainer.text import Bytes

NUM_BYTES = 256


def trigram_counts(part: Bytes) -> npt.NDArray[np.int64]:
    """Return how often each three bytes follow one another in `part`: [256, 256, 256]."""
    values = part.astype(np.int64)
    keys = (values[:-2] * NUM_BYTES + values[1:-1]) * NUM_BYTES + values[2:]
    return np.bincount(keys, minlength=NUM_BYTES**3).reshape(NUM_BYTES, NUM_BYTES, NUM_BYTES)


def trigram_loss(
    counts: npt.NDArray[np.int64], part: Bytes, starts: npt.NDArray[np.int64], length: int
) -> float:
    """Return the mean negative log likelihood, in nats per byte, of windows of `part`.

    The bytes predicted are `part[start + 1 : start + 1 + length]` for each start, the same ones
    that the model predicts; the trigram always sees the two bytes before each, also across the
    window's start. p(c | a b) = (n(a b c) + 1) / (n(a b) + 256).
    """
    at = starts[:, None] + 1 + np.arange(length)
    first, second, third = part[at - 2], part[at - 1], part[at]
    seen = counts[first, second, third] + 1
    total = counts.sum(axis=2)[first, second] + NUM_BYTES
    return float(np.mean(np.log(total) - np.log(seen)))
