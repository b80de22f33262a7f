"""Step times of many pipelines at once: the same longest path as pipeline_time.py, in waves.

For schedules given by warm-ups k_i (-> schedules.py) forward m of stage i runs in wave C_i + 2 m
and its backward in wave A_i + 2 m, where

    A_{n-1} = 0,  A_i = A_{i+1} + 1,  C_i = A_i - 2 k_i + 1

so that all runs of one wave are independent: they are computed together, for all pipelines. Stages
that hold all m microbatches never run a forward after a backward; for them C_i = C_{i+1} - 1 and
A_i = max(A_{i+1} + 1, C_i + 2 m - 1). Where the backward is split (zero-bubble-h1), the part by
input runs in those waves, followed by the part by weight of the microbatch that is d_i earlier.

A full pipeline is a max-plus linear map of what one wave hands on (clocks, links, values that
arrived) to the same a microbatch later. Its powers become periodic: once all of that has grown by
the same seconds over p microbatches, it does so until the forwards run out. So a run of few
microbatches gives the exact time of many; pipelines that have not settled are run with twice as
many. -> _Waves.settled()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Array = NDArray[np.float64]

ROUNDING = 1e-13  # of the time so far: growths that differ by less are the same


@frozen(eq=False)
class _Figures:
    """Seconds of pipelines: [stages, pipelines]; `crossing` to the next stage, 0 after the last."""

    forward: Array
    backward: Array  # the part by input, where it is split
    crossing: Array
    tail: Array
    weight: Array | None

    def some(self, which: NDArray[Any]) -> _Figures:
        """Return those of some pipelines."""
        return _Figures(
            self.forward[:, which],
            self.backward[:, which],
            self.crossing[:, which],
            self.tail[:, which],
            None if self.weight is None else self.weight[:, which],
        )


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
    size, num = forward.shape
    count = num_microbatches
    held = [min(k, count) for k in warmups]
    delay = np.zeros(num, dtype=np.int64)
    if weight is not None:
        least = [min(num - i, count) for i in range(num)]
        delay = np.array(held) - least
        held = least
        backward = backward - weight
    crossing = np.zeros((num, size))
    crossing[: num - 1] = boundary.T
    figures = _Figures(
        forward.T, backward.T, crossing, tail.T, None if weight is None else weight.T
    )
    if min(held) == count and not delay.any():
        return _all_forwards_first(figures, count)
    result = np.empty(size)
    left = np.arange(size)
    few = 2 * (max(held) + num)
    while few < count and max(held) < count and len(left):
        waves = _Waves(held, delay, few, figures.some(left))
        period, growth = waves.settled()
        seconds = waves.run()
        for p in np.unique(period[period > 0]):
            own = period == p
            more = (count - few) % p
            if more:
                seconds[own] = _Waves(held, delay, few + more, figures.some(left[own])).run()
            result[left[own]] = seconds[own] + growth[own] * ((count - few) // p)
        left = left[period == 0]
        few *= 2
    if len(left):
        result[left] = _Waves(held, delay, count, figures.some(left)).run()
    return result


class _Waves:
    """Pipelines of `count` microbatches, run wave by wave."""

    def __init__(
        self, held: Sequence[int], delay: NDArray[np.int64], count: int, figures: _Figures
    ) -> None:
        num, size = figures.forward.shape
        self.num, self.count, self.figures, self.delay = num, count, figures, delay
        self.begin_forward, self.begin_backward = _waves(held, count)
        self.wave = int(self.begin_forward.min())
        self.spans = 1 + max(held) + int(delay.max())  # microbatches of a critical circuit, at most
        self.clock = np.zeros((num, size))
        self.link_on, self.link_back = np.zeros((num, size)), np.zeros((num, size))
        # When a microbatch arrives at a stage from the stage before (after); in the last row what
        # the last stage sends on (the first one back), which nobody reads.
        self.arrived = np.zeros((num + 1, count, size))
        self.returned = np.zeros((num + 1, count, size))
        self.on_forward = _by_wave(self.begin_forward - self.wave, count)
        self.on_backward = _by_wave(self.begin_backward - self.wave, count)
        self.first_wave = self.wave

    def run(self) -> Array:
        """Return the step times, from the present wave on."""
        self.advance(int(self.begin_backward.max()) + 2 * self.count - 1)
        clock, weight = self.clock, self.figures.weight
        if weight is not None:
            clock = clock + self.delay[:, None] * weight
        result: Array = (clock + self.figures.tail).max(axis=0)
        return result

    def settled(self) -> tuple[NDArray[np.int64], Array]:
        """Return the least p, 0 if none was found, over which each pipeline grows evenly, and by
        how many seconds. Goes on to the wave where the first stage runs out of forwards."""
        size = self.clock.shape[1]
        period, growth = np.zeros(size, dtype=np.int64), np.zeros(size)
        stop = self.wave + 2 * self.count
        full = int(max(self.begin_backward + 2 * self.delay))
        start = max(full, stop - 2 * self.spans)
        start += (stop - start) % 2
        states = []
        for wave in range(start, stop + 1, 2):
            self.advance(wave)
            states.append(self._handed_on())
        last = states.pop()
        for p, state in enumerate(reversed(states), start=1):
            grown = last - state
            least, most = grown.min(axis=0), grown.max(axis=0)
            even = (period == 0) & (most - least <= ROUNDING * last.max(axis=0))
            period[even], growth[even] = p, most[even]
        return period, growth

    def _handed_on(self) -> Array:
        """Return all that later waves read of earlier ones, of stages that are full: [values,
        pipelines]."""
        found = [self.clock, self.link_on[:-1], self.link_back[1:]]
        on, back = (
            -((begin - self.wave) // 2) for begin in (self.begin_forward, self.begin_backward)
        )
        for i in range(self.num - 1):
            found.append(self.arrived[i + 1, on[i + 1] : on[i]])
            found.append(self.returned[i, back[i] : back[i + 1]])
        return np.concatenate(found)

    def advance(self, stop: int) -> None:
        """Run all waves before `stop`."""
        for wave in range(self.wave, stop):
            self._forwards(wave)
            self._backwards(wave)
        self.wave = max(stop, self.wave)

    def _forwards(self, wave: int) -> None:
        on, unit = self.on_forward.at(wave - self.first_wave)
        if not len(on):
            return
        stop = np.maximum(self.clock[on], self.arrived[on, unit]) + self.figures.forward[on]
        self.clock[on] = stop
        sent = np.maximum(stop, self.link_on[on]) + self.figures.crossing[on]
        self.link_on[on] = sent
        self.arrived[on + 1, unit] = sent

    def _backwards(self, wave: int) -> None:
        on, unit = self.on_backward.at(wave - self.first_wave)
        if not len(on):
            return
        stop = np.maximum(self.clock[on], self.returned[on, unit]) + self.figures.backward[on]
        self.clock[on] = stop
        if self.figures.weight is not None:
            late = on[unit >= self.delay[on]]
            self.clock[late] += self.figures.weight[late]
        sent = np.maximum(stop, self.link_back[on]) + self.figures.crossing[on - 1]
        self.link_back[on] = sent
        self.returned[on - 1, unit] = sent


@frozen(eq=False)
class _Running:
    """Stages and their microbatches by wave: `start` [waves + 1] where those of a wave begin."""

    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start: list[int]

    def at(self, wave: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the stages that run in a wave, and the microbatch of each."""
        own = slice(*self.start[wave : wave + 2]) if wave + 1 < len(self.start) else slice(0)
        return self.stage[own], self.microbatch[own]


def _by_wave(begin: NDArray[np.int64], count: int) -> _Running:
    """Return what runs in each wave where stages begin in waves `begin` and run in every second."""
    waves = (begin[:, None] + 2 * np.arange(count)).ravel()
    order = np.argsort(waves, kind="stable")
    start = np.searchsorted(waves[order], np.arange(int(waves.max()) + 2))
    return _Running(order // count, order % count, start.tolist())


def _all_forwards_first(figures: _Figures, count: int) -> Array:
    """Return the step times where every stage runs all its forwards before its backwards.

    A mesh or link that takes s seconds for each of what arrives at a_0, a_1, ... is done with m at
    max over j <= m of a_j + (m - j + 1) s.
    """
    num, size = figures.forward.shape
    steps = np.arange(count)[:, None]

    def done(arrived: Array, seconds: Array) -> Array:
        result: Array = np.maximum.accumulate(arrived - steps * seconds) + (steps + 1) * seconds
        return result

    clock = []
    arrived = np.zeros((count, size))
    for i in range(num):
        stop = done(arrived, figures.forward[i])
        clock.append(stop[-1])
        arrived = done(stop, figures.crossing[i])
    returned = np.zeros((count, size))
    for i in reversed(range(num)):
        whole = figures.backward[i]
        if figures.weight is not None:
            whole = whole + figures.weight[i]
        stop = done(np.maximum(returned, clock[i]), whole)
        clock[i] = stop[-1]
        if figures.weight is not None:
            stop = stop - figures.weight[i]
        returned = done(stop, figures.crossing[i - 1]) if i else stop
    result: Array = (np.array(clock) + figures.tail).max(axis=0)
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
