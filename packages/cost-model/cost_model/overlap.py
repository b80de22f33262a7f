"""Communication that runs while a device computes.

Kernels and collectives that share a device slow each other by a factor k > 1 (Galvatron measures
1.13 to 1.3). With C seconds of computation that may overlap and D of communication:

    both run, each at 1 / k, then the longer one alone:
    seconds = max(C, D) + (k - 1) min(C, D)                                     -> overlapped()

that is, min(C, D) seconds of each are stretched by k and the rest runs alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

DEFAULT_SLOWDOWN = 1.15


@frozen(kw_only=True)
class Overlap:
    """Seconds of a computation with communication beside it."""

    seconds: Any  # until both are done
    exposed: Any  # communication after or beyond the computation, its slowdown included
    hidden_share: Any  # of the communication


def overlapped(compute: Any, communication: Any, slowdown: float = DEFAULT_SLOWDOWN) -> Overlap:
    """Return what running `communication` beside `compute` (seconds, numbers or arrays) takes.

    Overlapping is never worse than doing one after the other: with a slowdown of 2 they are equal.
    """
    if not 1 <= slowdown <= 2:
        raise ValueError(f"slowdown must be between 1 and 2, got {slowdown}")
    both = np.minimum(compute, communication)
    seconds = np.maximum(compute, communication) + (slowdown - 1) * both
    exposed = seconds - compute
    with np.errstate(divide="ignore", invalid="ignore"):
        hidden = np.where(np.asarray(communication) > 0, 1 - exposed / communication, 1.0)
    if np.ndim(seconds) == 0:
        return Overlap(seconds=float(seconds), exposed=float(exposed), hidden_share=float(hidden))
    return Overlap(seconds=seconds, exposed=exposed, hidden_share=hidden)


def gradient_reduction(
    backward: float, reduction: float, num_buckets: int, slowdown: float = DEFAULT_SLOWDOWN
) -> Overlap:
    """Return a backward pass whose gradient reduction starts bucket by bucket.

    The first of `num_buckets` equal buckets is complete after 1 / num_buckets of the backward pass,
    and the last one is reduced after its end: (n - 1) / n of each can overlap.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    share = (num_buckets - 1) / num_buckets
    inner = overlapped(share * backward, share * reduction, slowdown)
    seconds = inner.seconds + (1 - share) * (backward + reduction)
    exposed = seconds - backward
    return Overlap(
        seconds=seconds,
        exposed=exposed,
        hidden_share=1 - exposed / reduction if reduction > 0 else 1.0,
    )
