"""Stages and free devices that pipelines faster than a limit can have.

In a step of T seconds N devices have N T device-seconds. A stage of layers l..k on s devices takes
s T of them, since they wait for the step's end, and the layers before and after it at least

    D(k) = min over l < k and submeshes s of  D(l) + s busy(l..k, s),   busy = B t + u

and the same from the other end. Stages that leave too little for the others, and numbers of free
devices that are too few for the layers to come, or too many for those that were, are in no pipeline
of less than T seconds: of 96 layers on 1,024 devices some hundredth of both is left. -> window_of()
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.device_pool import CoarsePool, DevicePool
from stage_dp.menu_table import Array, Sequences

SLACK = 1 + 1e-9  # of sums in another order


@frozen(eq=False)
class Window:
    """`stages` [layers, layers + 1, kinds]: whether a stage can be; `states` [layers + 1] those of
    free devices before a layer, none where no pipeline is cut there."""

    stages: NDArray[np.bool_]
    states: tuple[slice, ...]


def window_of(
    sequences: Sequences, pool: DevicePool | CoarsePool, busy: Array, limit: float
) -> Window:
    """Return what pipelines of less than `limit` seconds can have; `busy` [sequences, kinds, ...]:
    the least seconds that a stage's devices work."""
    least = busy.reshape(*busy.shape[:2], -1).min(axis=2)
    least = np.append(
        np.where(least < limit * SLACK, least, np.inf), [[np.inf] * least.shape[1]], 0
    )
    by_range = least[sequences.number[:-1]]  # [layers, layers + 1, kinds]
    devices = np.array([kind.num_devices for kind in pool.kinds], dtype=np.float64)
    before, after = device_seconds(by_range, devices)
    room = pool.num_devices * limit * SLACK
    taken = before[:-1, None, None] + devices * limit + after[None, :, None]
    stages = np.isfinite(by_range) & (taken <= room)
    # The pool may count devices in units: by its own account nothing fits that does not fit there.
    before, after = device_seconds(
        np.where(stages, by_range, np.inf), pool.taken.astype(np.float64)
    )
    free = pool.free.astype(np.float64)
    fits = (before[:, None] <= (free[0] - free) * limit * SLACK) & (
        after[:, None] <= free * limit * SLACK
    )
    fits[0, 1:] = False
    return Window(stages, tuple(_span(row) for row in fits))


def mean_work(sequences: Sequences, pool: DevicePool | CoarsePool, busy: Array) -> float:
    """Return the least device-seconds of all layers for each device: a bound; inf where no stages
    hold them."""
    devices = np.array([kind.num_devices for kind in pool.kinds], dtype=np.float64)
    least = np.append(busy.reshape(*busy.shape[:2], -1).min(axis=2), [[np.inf] * len(devices)], 0)
    return float(device_seconds(least[sequences.number[:-1]], devices)[1][0]) / pool.num_devices


def device_seconds(by_range: Array, devices: Array) -> tuple[Array, Array]:
    """Return the least device-seconds of the layers before and from each layer on: [layers + 1]
    each. `by_range` [layers, layers + 1, kinds] seconds, on so many `devices` [kinds]."""
    with np.errstate(invalid="ignore"):
        each = np.where(np.isfinite(by_range), by_range * devices, np.inf).min(axis=2)
    layers = len(each)
    before, after = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    before[0] = after[layers] = 0.0
    for layer in range(1, layers + 1):
        before[layer] = (before[:layer] + each[:layer, layer]).min()
    for layer in range(layers - 1, -1, -1):
        after[layer] = (each[layer, layer + 1 :] + after[layer + 1 :]).min()
    return before, after


def _span(row: NDArray[np.bool_]) -> slice:
    found = np.flatnonzero(row)
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)
