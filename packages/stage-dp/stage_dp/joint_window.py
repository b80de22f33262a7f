"""Stages and free devices that pipelines faster than a limit can have.

In a step of T seconds N devices have N T device-seconds. A stage of layers l..k on s devices takes
s T of them, since they wait for the step's end, and the layers before and after it at least

    D(k) = min over l < k and submeshes s of  D(l) + s busy(l..k, s),   busy = B t + u

and the same from the other end. Stages that leave too little for the others, and numbers of free
devices that are too few for the layers to come, or too many for those that were, are in no pipeline
of less than T seconds: of 96 layers on 1,024 devices some hundredth of both is left.
-> DeviceSeconds
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from stage_dp.device_pool import CoarsePool, DevicePool
from stage_dp.menu_table import Array, Index, Sequences

SLACK = 1 + 1e-9  # of sums in another order

Stages = tuple[Index, ...]


@frozen(eq=False)
class Window:
    """`stages`: (layer start, layer stop, kind) of those that can be, in this order; `states`
    [layers + 1] those of free devices before a layer, none where no pipeline is cut there."""

    stages: Stages
    states: tuple[slice, ...]


@frozen(eq=False)
class DeviceSeconds:
    """What the stages of one microbatch count take of the devices of a pool.

    `by_range` [layers, layers + 1, kinds]: the least seconds that a stage's devices work. `before`
    and `after` [layers + 1]: the least device-seconds of the layers before and from each layer on;
    `units_before` and `units_after` by what submeshes take in the pool.
    """

    pool: DevicePool | CoarsePool
    by_range: Array
    before: Array
    after: Array
    units_before: Array
    units_after: Array

    @classmethod
    def of(cls, sequences: Sequences, pool: DevicePool | CoarsePool, busy: Array) -> DeviceSeconds:
        """Return those of stages with `busy` seconds [sequences, kinds, ...]."""
        least = busy.reshape(*busy.shape[:2], -1).min(axis=2)
        least = np.append(least, [[np.inf] * least.shape[1]], 0)
        by_range = least[sequences.number[:-1]]
        devices = _devices(pool)
        before, after = _sums(by_range, devices)
        units = pool.taken.astype(np.float64)
        own = before, after
        if (units != devices).any():
            own = _sums(by_range, units)
        return cls(pool, by_range, before, after, *own)

    @property
    def mean(self) -> float:
        """Return the device-seconds of all layers for each device: a bound; inf where no stages
        hold them."""
        return float(self.after[0]) / self.pool.num_devices

    def window(self, limit: float) -> Window | None:
        """Return what pipelines of less than `limit` seconds can have, None if anything."""
        if limit == np.inf:
            return None
        pool, most = self.pool, limit * SLACK
        room = pool.num_devices * most - _devices(pool) * limit
        taken = self.before[:-1, None] + self.after
        stages = (self.by_range < most) & (taken[:, :, None] <= room)
        # The pool may count devices in units: by its account nothing fits that does not fit there.
        free = pool.free.astype(np.float64)
        fits = (self.units_before[:, None] <= (free[0] - free) * most) & (
            self.units_after[:, None] <= free * most
        )
        fits[0, 1:] = False
        first, found = fits.argmax(axis=1), fits.any(axis=1)
        stop = np.where(found, fits.shape[1] - fits[:, ::-1].argmax(axis=1), 0)
        return Window(np.nonzero(stages), tuple(map(slice, first.tolist(), stop.tolist())))


def _devices(pool: DevicePool | CoarsePool) -> Array:
    return np.array([kind.num_devices for kind in pool.kinds], dtype=np.float64)


def _sums(by_range: Array, devices: Array) -> tuple[Array, Array]:
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
