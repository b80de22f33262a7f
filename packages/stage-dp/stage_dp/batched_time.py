"""Step times of many pipelines at once: the same longest path as pipeline_time.py, in waves.

For schedules given by warm-ups k_i (-> schedules.py) forward m of stage i runs in wave C_i + 2 m
and its backward in wave A_i + 2 m, where

    A_{n-1} = 0,  A_i = A_{i+1} + 1,  C_i = A_i - 2 k_i + 1

so that all runs of one wave are independent: they are computed together, for all pipelines. Stages
that hold all m microbatches never run a forward after a backward; for them C_i = C_{i+1} - 1 and
A_i = max(A_{i+1} + 1, C_i + 2 m - 1). Where the backward is split (zero-bubble-h1), the part by
input runs in those waves, followed by the part by weight of the microbatch that is d_i earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def batched_step_seconds(
    warmups: Sequence[int],
    num_microbatches: int,
    forward: Array,
    backward: Array,
    boundary: Array,
    tail: Array,
    weight: Array | None = None,
) -> Array:
    """Return the step time of each pipeline: [pipelines].

    `forward`, `backward`, `tail`: [pipelines, stages]; `boundary`: one way, [pipelines, stages -
    1]. `warmups` must not grow from one stage to the next. `weight` [pipelines, stages]: the part
    of `backward` by weight, for "zero-bubble-h1", whose `warmups` are the microbatches in flight.
    """
    num, count = forward.shape[1], num_microbatches
    held = [min(k, count) for k in warmups]
    delay = np.zeros(num, dtype=np.int64)
    if weight is not None:
        least = [min(num - i, count) for i in range(num)]
        delay = np.array(held) - least
        held = least
        backward = backward - weight
    begin_forward, begin_backward = _waves(held, count)
    size = forward.shape[0]
    clock = np.zeros((num, size))
    # When microbatch m arrives at stage i from the stage before (after); row -1 of time is unused.
    arrived = np.zeros((num, count, size))
    returned = np.zeros((num, count, size))
    link_on, link_back = np.zeros((num, size)), np.zeros((num, size))
    f, b = forward.T, backward.T
    crossing = np.zeros((num, size))
    crossing[: num - 1] = boundary.T
    first = min(begin_forward)
    for wave in range(first, max(begin_backward) + 2 * count - 1):
        units = (wave - begin_forward) // 2
        on = np.flatnonzero(((wave - begin_forward) % 2 == 0) & (units >= 0) & (units < count))
        if len(on):
            unit = units[on]
            stop = np.maximum(clock[on], arrived[on, unit]) + f[on]
            clock[on] = stop
            sends = on < num - 1
            rows, stop, unit = on[sends], stop[sends], unit[sends]
            sent = np.maximum(stop, link_on[rows]) + crossing[rows]
            link_on[rows] = sent
            arrived[rows + 1, unit] = sent
        units = (wave - begin_backward) // 2
        on = np.flatnonzero(((wave - begin_backward) % 2 == 0) & (units >= 0) & (units < count))
        if len(on):
            unit = units[on]
            stop = np.maximum(clock[on], returned[on, unit]) + b[on]
            clock[on] = stop
            if weight is not None:
                late = on[unit >= delay[on]]
                clock[late] += weight.T[late]
            sends = on > 0
            rows, stop, unit = on[sends], stop[sends], unit[sends]
            sent = np.maximum(stop, link_back[rows]) + crossing[rows - 1]
            link_back[rows] = sent
            returned[rows - 1, unit] = sent
    if weight is not None:
        clock += delay[:, None] * weight.T
    result: Array = (clock.T + tail).max(axis=1)
    return result


def extrapolated_step_seconds(
    warmups: Sequence[int],
    num_microbatches: int,
    forward: Array,
    backward: Array,
    boundary: Array,
    tail: Array,
    weight: Array | None = None,
) -> Array:
    """Return the step times with many microbatches from those with few: [pipelines].

    A longest path grows by one period per microbatch once the pipeline is full, so two runs give
    the rest, but where a stage that is slower by a little takes over late: each stage's own busy
    time with the way to it is the least. Below the exact time by less than 1e-3 where it differs.
    """
    num = forward.shape[1]
    held = max((k for k in warmups if k < num_microbatches), default=num)
    short = 2 * held + 2 * num
    long = short + num + 4
    figures = (forward, backward, boundary, tail, weight)
    if num_microbatches <= long:
        return batched_step_seconds(warmups, num_microbatches, *figures)
    runs = []
    for count in (short, long):
        # A stage that holds all microbatches does so in the short run too.
        some = [count if k >= num_microbatches else min(k, count) for k in warmups]
        runs.append(batched_step_seconds(some, count, *figures))
    period = (runs[1] - runs[0]) / (long - short)
    seconds = forward + backward
    split = weight is not None
    way = forward[:, :-1] + boundary if split else seconds[:, :-1] + 2 * boundary
    before = np.concatenate([np.zeros((len(way), 1)), np.cumsum(way, axis=1)], axis=1)
    own = before + num_microbatches * seconds + (tail if split else tail[:, :1])
    result: Array = np.maximum(runs[1] + (num_microbatches - long) * period, own.max(axis=1))
    return result


def _waves(held: Sequence[int], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the waves of the first forward and the first backward of each stage."""
    num = len(held)
    forward, backward = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
    for i in reversed(range(num)):
        after = backward[i + 1] + 1 if i + 1 < num else 0
        if held[i] < count or i + 1 == num:
            backward[i] = after
            forward[i] = after - 2 * held[i] + 1
        else:
            forward[i] = min(forward[i + 1] - 1, after - 2 * count + 1)
            backward[i] = max(after, forward[i] + 2 * count - 1)
    return forward, backward
