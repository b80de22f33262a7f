"""Seconds of a pipelined step from the seconds of its stages.

With s_k the seconds of a forward and a backward pass of stage k of p, f_k those of the forward
pass, h those of a transfer between neighbours and m microbatches, one-forward-one-backward takes

    T   = max over k of D_k + s_k + (m - 1) P_k + U_k                -> one_forward_one_backward()
    D_k = sum_{j<k} s_j + 2 k h               way from the first stage and back to it
    U_k = sum_{j>k} s_j + 2 (p - 1 - k) h     way to the last stage and back, less the forward
          - (w_k - 1) f_k, at least 0         passes of other microbatches that run meanwhile
    P_k = max over i <= k <= j of (sum_{l=i..j} s_l + 2 (j - i) h) / (j - i + 1)     -> periods()

with w_k = min(m, p - k) microbatches in flight. P_k is the largest mean weight of a cycle of the
schedule through stage k: it starts a microbatch's forward pass only after the backward pass of an
earlier one, whose gradient came from the next stage. `simulate` executes the same schedule
instruction by instruction; the tests hold one to the other. Interleaving v chunks divides what is
idle while the pipeline fills and drains by v.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def one_forward_one_backward(
    stages: Sequence[float],
    hop: float,
    num_microbatches: int,
    chunks: int = 1,
    forward_share: float = 1 / 3,
) -> float:
    """Return the seconds of all microbatches through `stages`, `hop` seconds apart."""
    count = len(stages)
    if count == 1:
        return num_microbatches * stages[0]
    steady = periods(stages, hop * chunks)
    before, after, longest = 0.0, sum(stages), 0.0
    for place, (stage, period) in enumerate(zip(stages, steady, strict=True)):
        after -= stage
        rest = count - 1 - place
        hidden = min(num_microbatches - 1, rest) * forward_share * stage
        waited = max(after + 2 * hop * rest - hidden, 0.0)
        idle = (before + waited) / chunks + 2 * hop * place
        longest = max(longest, idle + stage + (num_microbatches - 1) * period)
        before += stage
    return longest


def periods(stages: Sequence[float], hop: float) -> Sequence[float]:
    """Return per stage the seconds from one microbatch to the next once the pipeline is full."""
    if hop == 0.0:
        return stages
    sums = np.concatenate([[0.0], np.cumsum(stages)])
    count = np.arange(len(stages))
    length = count[None, :] - count[:, None] + 1  # [first, last] stage of a cycle
    valid = np.maximum(length, 1)
    mean = (sums[None, 1:] - sums[:-1, None] + 2 * hop * (valid - 1)) / valid
    mean[length < 1] = 0.0
    # the best cycle through k starts at or before it and ends at or after it
    best = np.maximum.accumulate(mean[:, ::-1], axis=1)[:, ::-1]
    found: list[float] = np.maximum.accumulate(best, axis=0).diagonal().tolist()
    return found
