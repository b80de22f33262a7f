"""Backward sweeps over (layer, place, free devices) with all layer ranges and submeshes as arrays.

    F(l, v, r) = min over ranges l..k and submeshes s of  w(l..k, s, v) + 2 c(k, s)
                 + F(k, v - 1, r - s)                              (no 2 c at the last one)

over states r of free devices (-> device_pool.py). v is the place of the stage at l, counted from
the last stage; where neither memory nor the number of stages matters there is one level for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.device_pool import CoarsePool, DevicePool
from stage_dp.joint_window import Stages, Window
from stage_dp.menu_table import Array, Index, Sequences

NEVER = 1e30  # seconds; finite, so that what cannot be stays infinite


@frozen(eq=False)
class Space:
    """What all sweeps of a problem share.

    `following` [kinds, states + 1, choices]: states after taking a submesh, the last one dead.
    """

    sequences: Sequences
    num_layers: int
    pool: DevicePool | CoarsePool
    following: Index
    use_all_devices: bool
    stages: Stages  # all (layer start, layer stop, kind)

    @classmethod
    def of(
        cls, sequences: Sequences, num_layers: int, pool: DevicePool | CoarsePool, use_all: bool
    ) -> Space:
        """Return the space over a pool of devices."""
        width = max(table.shape[1] for table in pool.following)
        following = np.full((len(pool.kinds), pool.num_states + 1, width), pool.dead)
        for k, table in enumerate(pool.following):
            following[k, :, : table.shape[1]] = table
        there = np.repeat((sequences.number[:-1] >= 0)[:, :, None], len(pool.kinds), axis=2)
        return cls(sequences, num_layers, pool, following, use_all, np.nonzero(there))

    def crossing(self, least: Array, far: Array) -> Array:
        """Return the seconds after a stage of each kind that stops at a layer, by the free devices
        before it, [layers + 1, kinds, states + 1]: `far` [layers + 1, kinds] where that is counted
        as one that crosses hosts (`DevicePool.fills`), else `least`."""
        return np.where(self.pool.fills, far[:, :, None], least[:, :, None])


@frozen(kw_only=True, eq=False)
class Entrance:
    """One stage of a pipeline counts otherwise: F enters through it from another sweep.

    Its value is `weight` (at the first layer `first`) + max(0, F of `suffix` after it, with the
    crossing of `suffix`).
    """

    suffix: Sweep
    weight: Array
    first: Array


@frozen(kw_only=True, eq=False)
class Wait:
    """The least value through a stage that waits for the stages after it: `weight` and F of
    `suffix` after it, with the crossing of `suffix`."""

    suffix: Sweep
    weight: Array


class Sweep:
    """One sweep. Weights are [sequences, kinds, levels], inf where a stage is not allowed.

    `crossing` [layers + 1, kinds, states + 1]: seconds added to the weight of a stage that is not
    the last, by the layer where it stops and the free devices before it. `first`: weights of the
    stage at layer 0 if others. `floor`, `first_floor` and `wait`: the least value through a stage.
    `open_ended`: the last level stands for all places from it on. `window`: of pipelines others
    than these nothing is asked.
    """

    def __init__(
        self,
        space: Space,
        weight: Array,
        crossing: Array,
        *,
        counted: bool,
        open_ended: bool = False,
        first: Array | None = None,
        floor: Array | None = None,
        first_floor: Array | None = None,
        wait: Wait | None = None,
        entrance: Entrance | None = None,
        window: Window | None = None,
    ) -> None:
        self.space, self.crossing = space, crossing
        self.entrance, self.wait = entrance, wait
        self.counted, self.open_ended = counted, open_ended
        layers, states = space.num_layers, space.pool.num_states
        self.levels = weight.shape[2] if counted else 1
        rows = self.levels + 1 if counted else 1
        self.value: Array = np.full((layers + 1, rows, states + 1), np.inf)
        if entrance is None:
            self.value[layers, 0, :states] = (
                np.where(space.pool.free == 0, 0.0, np.inf) if space.use_all_devices else 0.0
            )
        kinds = len(space.pool.kinds)
        # F after each kind of stage that stops at a layer, its crossing included.
        self.after: Array = np.full((layers + 1, kinds, self.levels, states + 1), np.inf)
        self._pass_on(layers)
        starts, stops, kind = space.stages if window is None else window.stages
        number = space.sequences.number[starts, stops]
        own = np.flatnonzero(np.any(weight < np.inf, axis=2)[number, kind])
        self._stops, self._kind, self._number = stops[own], kind[own], number[own]
        # Where the stages of each layer begin among all.
        self._begin: list[int] = np.searchsorted(starts[own], np.arange(layers + 1)).tolist()
        self._weight = self._each(weight, first)
        self._floor = None if floor is None else self._each(floor, first_floor)
        self._waiting = None if wait is None else self._each(wait.weight, None)
        self._entry = None if entrance is None else self._each(entrance.weight, entrance.first)
        for layer in range(layers - 1, -1, -1):
            looked_at = slice(0, states) if window is None else window.states[layer]
            if self._begin[layer] < self._begin[layer + 1] and looked_at.start < looked_at.stop:
                least = self._values(layer, looked_at).min(axis=0)
                self.value[layer, 1 if counted else 0 :, looked_at] = least
                self._pass_on(layer)

    def _each(self, weight: Array, first: Array | None) -> Array:
        """Return the weights of all stages, [stages, levels], those at layer 0 by `first`."""
        result: Array = weight[self._number, self._kind]
        if first is not None:
            start = slice(self._begin[1])
            result[start] = first[self._number[start], self._kind[start]]
        return result

    def _values(self, layer: int, states: slice | int) -> Array:
        """Return F through each stage that starts at `layer`: [stages, levels, states]."""
        own = slice(*self._begin[layer : layer + 2])
        stops, kind = self._stops[own], self._kind[own]
        value: Array = self.after[..., states][stops, kind] + _spread(self._weight[own], states)
        if self.entrance is not None and self._entry is not None:
            after = np.maximum(self.entrance.suffix.after[..., states][stops, kind], 0.0)
            value = np.minimum(value, after + _spread(self._entry[own], states))
        if self._floor is not None:
            value = np.maximum(value, _spread(self._floor[own], states))
        if self.wait is not None and self._waiting is not None:
            after = self.wait.suffix.after[..., states][stops, kind]
            value = np.maximum(value, after + _spread(self._waiting[own], states))
        return value

    def _pass_on(self, layer: int) -> None:
        suffix = self.value[layer, :-1] if self.counted else self.value[layer]
        if self.counted and self.open_ended:
            suffix = np.concatenate([suffix[:-1], self.value[layer, -2:].min(axis=0)[None]])
        following = self.space.following
        reached = suffix[:, following[:, :, 0]]  # [levels, kinds, states + 1]
        for choice in range(1, following.shape[2]):
            reached = np.minimum(reached, suffix[:, following[:, :, choice]])
        self.after[layer] = reached.transpose(1, 0, 2)
        if layer < self.space.num_layers:
            self.after[layer] += self.crossing[layer, :, None]

    def forget(self, where: NDArray[np.bool_]) -> None:
        """Set F below every sum at `where` [layers + 1, levels, states], for an entrance."""
        known = self.value[:, :, :-1]
        self.value[:, :, :-1] = np.where(where & np.isfinite(known), -NEVER, known)
        for layer in range(len(self.value)):
            self._pass_on(layer)

    def best(self, levels: Sequence[int] | None = None) -> float:
        """Return the least F of whole pipelines; `levels`: of these numbers of stages."""
        return float(self.value[0, self._final(levels), 0].min())

    def _final(self, levels: Sequence[int] | None) -> list[int]:
        return list(levels) if levels and self.counted else list(range(self.value.shape[1]))

    def chain(self, levels: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
        """Return (layer start, layer stop, kind) of the stages of a pipeline with F = best()."""
        final = self._final(levels)
        level = final[int(np.argmin(self.value[0, final, 0]))]
        return self._chain_from(0, level, 0)

    def _chain_from(self, layer: int, level: int, state: int) -> list[tuple[int, int, int]]:
        """Return the stages from a layer on, of as many free devices."""
        result = []
        sweep: Sweep = self
        while layer < self.space.num_layers:
            row = level - 1 if self.counted else 0
            through = sweep._values(layer, state)[:, row]
            at = int(np.argmin(through))
            stop, kind = (int(p[sweep._begin[layer] + at]) for p in (sweep._stops, sweep._kind))
            result.append((layer, stop, kind))
            if sweep.entrance is not None:
                onward = sweep.after[stop, kind, row, state] + sweep._weight_at(layer, at, row)
                if onward > through[at]:  # it enters here
                    sweep = sweep.entrance.suffix
            choices = self.space.following[kind, state]
            before = [max(level - 1, 0)]
            if self.open_ended and level == self.levels:
                before.append(level)
            level, state = min(
                ((v, int(s)) for v in before for s in choices),
                key=lambda item: float(sweep.value[stop, item[0], item[1]]),
            )
            layer = stop
        return result

    def _weight_at(self, layer: int, stage: int, row: int) -> float:
        return float(self._weight[self._begin[layer] + stage, row])


def _spread(weight: Array, states: slice | int) -> Array:
    return weight if isinstance(states, int) else weight[:, :, None]
