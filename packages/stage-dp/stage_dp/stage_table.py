"""The recurrences of stage construction, for one microbatch count B and one schedule.

A plan cuts layers 0..L into stages; stage i runs a candidate of t_i = forward + backward seconds
per microbatch, c_i seconds one way to the next stage (0 for the last), u_i seconds of
synchronisation and update per step. All sweeps go from the last layer to the first over states
(layer l, level v, free devices r); the *level* says how many microbatches the suffix's first stage
holds in flight (and, where the number of stages is fixed, how many stages the suffix has).

    cheapest(M):  F(l, v, r) = min over candidates of l..k with bottleneck <= M, memory for level v,
                  submesh s of  cost + F(k, v before, r - s)
    leaking():    the same with max(missing bytes, .) in place of the sum: the least missing memory
    bound():      W(l, r) = min max(B t, t + 2c + W(k, r - s)), the time from the first forward to
                  the last backward of a suffix, with every t replaced by its lower bound

with cost a_i and bottleneck b_i of a stage such that sum a_i + max b_i is the step time of a
pipeline whose slowest stage sets the pace (Alpa's formula for c = u = 0). -> schedules.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from alpa_interchange.stage import StageCandidate, StageProblem
from stage_dp.device_pool import DevicePool
from stage_dp.schedules import SCHEDULE_RULES, extra_in_flight

MAX_BLOCK = 500_000  # numbers in one temporary array

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@frozen
class Level:
    """In-flight microbatches of a suffix's first stage; the suffix's stages if that is fixed."""

    in_flight: int
    num_stages: int


def first_level(schedule: str, num_microbatches: int) -> Level:
    """Return the level of the empty suffix."""
    rule = SCHEDULE_RULES[schedule]
    return Level(0 if rule.held else rule.least_at(1, num_microbatches), 0)


def next_level(
    level: Level, schedule: str, num_microbatches: int, extra: int, counted: bool
) -> Level:
    """Return the level after one more stage in front; `extra` is for "adaptive"."""
    k, held = level.in_flight, SCHEDULE_RULES[schedule].held
    if held:
        k += held + extra if k else 1
    return Level(min(k, num_microbatches), level.num_stages + 1 if counted else 0)


class StageTable:
    """Candidates of one microbatch count as arrays, sorted by their first layer.

    `cost`, `bottleneck`: [candidates], seconds, as in the module docstring. `holds`: [candidates],
    the most microbatches in flight that fit in memory. `by_layer[l]`: candidate numbers that start
    at l.
    """

    def __init__(
        self,
        problem: StageProblem,
        candidates: Sequence[StageCandidate],
        schedule: str,
        pool: DevicePool,
        kept_for_weights: bool | None = None,
    ) -> None:
        """`kept_for_weights`: stages keep what a split backward reads in its part by weight; None:
        where the schedule splits it."""
        self.problem = problem
        self.candidates = tuple(candidates)
        self.schedule = schedule
        self.num_microbatches = candidates[0].num_microbatches
        self.pool = pool
        num = self.num_microbatches
        last = np.array([c.layer_stop == problem.num_layers for c in candidates])
        self.forward = np.array([c.forward_seconds for c in candidates])
        self.backward = np.array([c.backward_seconds for c in candidates])
        self.later = np.zeros_like(self.forward)  # backward by weight, where it is split
        if SCHEDULE_RULES[schedule].splits_backward:
            self.later = np.array([c.backward_weight_seconds for c in candidates])
        self.crossing = np.where(last, 0.0, [c.boundary_seconds for c in candidates])
        self.update = np.array([c.step_seconds for c in candidates])
        seconds, crossing = self.forward + self.backward, self.crossing
        self.least = np.minimum(seconds, [c.lower_bound_seconds for c in candidates])
        pace_of = SCHEDULE_RULES[schedule].pace
        pace = np.zeros_like(seconds)
        if pace_of is not None:
            pace = pace_of(self.forward, self.backward, crossing)
        path = np.maximum(seconds - 2 * self.later, 0.0) + 2 * crossing
        self.cost = path * (num if schedule == "sequential" else 1)
        self.bottleneck = (num - 1) * pace + 2 * self.later + self.update
        self.extra = [
            extra_in_flight(c, t) if schedule == "adaptive" and t > 0 else 0
            for c, t in zip(crossing.tolist(), seconds.tolist(), strict=True)
        ]
        memory = [problem.device_groups[c.submesh.host_group].memory for c in candidates]
        self.memory = np.array(memory)
        self.state = np.array([c.state_bytes + c.transient_bytes for c in candidates])
        if kept_for_weights is None:
            kept_for_weights = SCHEDULE_RULES[schedule].splits_backward
        if kept_for_weights:
            self.state += np.array([c.delayed_bytes for c in candidates])
        self.activation = np.array([c.activation_bytes for c in candidates])
        self.kind = np.array([pool.kinds.index(c.submesh) for c in candidates], dtype=np.int64)
        self.stop = np.array([c.layer_stop for c in candidates], dtype=np.int64)
        starts = np.array([c.layer_start for c in candidates])
        self.by_layer: list[Index] = [
            np.flatnonzero(starts == layer) for layer in range(problem.num_layers)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            room = (self.memory - self.state) * (1 + 1e-12)
            holds = np.where(self.activation > 0, np.floor(room / self.activation), np.inf)
        self.holds: Array = np.where(room < 0, -1.0, holds)
        # A way into a suffix: the layer it begins at, the submesh taken, the extra in flight.
        number: dict[tuple[int, int, int], int] = {}
        triples = zip(self.stop.tolist(), self.kind.tolist(), self.extra, strict=True)
        self.way: Index = np.array([number.setdefault(t, len(number)) for t in triples])
        self.num_ways = len(number)
        self.ways: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.num_layers + 1)]
        for (stop, kind, extra), row in number.items():
            self.ways[stop].append((row, kind, extra))
        self._set_levels()

    def _set_levels(self) -> None:
        """Number the levels that a suffix can have, with and without regard to memory."""
        counted = self.problem.num_stages is not None
        most = self.problem.num_stages or min(self.problem.num_layers, self.most_stages())
        extras = sorted(set(self.extra))
        empty = first_level(self.schedule, self.num_microbatches)
        number = {empty: 0}
        queue = [(empty, 0)]
        for level, depth in queue:
            for extra in extras:
                new = next_level(level, self.schedule, self.num_microbatches, extra, counted)
                if new not in number and depth < most:
                    number[new] = len(number)
                    queue.append((new, depth + 1))
        self.levels = [level for level, _ in queue]
        self.in_flight = np.array([level.in_flight for level in self.levels])
        self.step: dict[int, list[int]] = {}
        for extra in extras:
            self.step[extra] = [
                number.get(
                    next_level(level, self.schedule, self.num_microbatches, extra, counted), -1
                )
                for level in self.levels
            ]

    @property
    def smallest(self) -> int:
        """Return the devices of the smallest submesh."""
        return min(kind.num_devices for kind in self.pool.kinds)

    def most_stages(self) -> int:
        """Return an upper bound on the stages that fit on the devices."""
        return max(1, int(self.pool.free[0]) // self.smallest)

    def missing(self, in_flight: NDArray[np.int64]) -> Array:
        """Return the bytes beyond each device's memory: [candidates, len(in_flight)]."""
        need = self.state[:, None] + self.activation[:, None] * in_flight[None, :]
        return np.maximum(0.0, need - self.memory[:, None] * (1 + 1e-12))


@frozen(kw_only=True)
class Entrance:
    """One stage of a plan counts otherwise than the rest: F enters through it from another sweep.

    Its value is `weight` + max(0, `crossing` + F of `suffix` after it) for candidates in `mask`.
    """

    suffix: Sweep
    mask: NDArray[np.bool_]
    weight: Array
    crossing: Array


class Sweep:
    """One backward sweep over the layers, and the plans it can be asked for.

    `value` [layers + 1, levels, states + 1]: F of the module docstring. With `use_memory` False and
    free stage count, levels are merged into one, which is as much faster as there are levels.
    """

    def __init__(
        self,
        table: StageTable,
        *,
        allowed: NDArray[np.bool_],
        weight: Array,
        combine: str = "sum",
        use_memory: bool = True,
        floor: Array | None = None,
        extra_at_start: Array | None = None,
        per_level: bool = False,
        entrance: Entrance | None = None,
    ) -> None:
        self.table = table
        self.weight = weight
        self.combine = combine
        self.floor = floor
        self.extra_at_start = extra_at_start
        self.allowed = allowed
        self.entrance = entrance
        problem, pool = table.problem, table.pool
        self.merged = merged = not use_memory and not per_level and problem.num_stages is None
        self.step = {extra: [0] for extra in table.step} if merged else table.step
        num_levels = 1 if merged else len(table.levels)
        self.fits: NDArray[np.bool_] = np.ones((len(weight), num_levels), dtype=bool)
        if use_memory:
            self.fits = table.holds[:, None] >= table.in_flight[None, :]
        self.penalty = np.where(self.fits, 0.0, np.inf)
        self.by_level = table.missing(table.in_flight) if combine == "missing" else None
        layers = problem.num_layers
        self.value: Array = np.full((layers + 1, num_levels, pool.num_states + 1), np.inf)
        if entrance is None:
            self.value[layers, 0, : pool.num_states] = (
                np.where(pool.free == 0, 0.0, np.inf) if problem.use_all_devices else 0.0
            )
        self._after: Array = np.empty((table.num_ways, *self.value.shape[1:]))
        self._chunk = max(1, MAX_BLOCK // self.value[0].size)
        self._pass_on(layers)
        for layer in range(layers - 1, -1, -1):
            for part in self._parts(layer):
                values = self._values(part, layer)
                np.minimum(self.value[layer], values.min(axis=0), out=self.value[layer])
            self._pass_on(layer)

    def _parts(self, layer: int) -> Iterator[Index]:
        """Yield the allowed candidates that start at `layer`, in parts that keep arrays small."""
        chosen = self.table.by_layer[layer]
        chosen = chosen[self.allowed[chosen]]
        for first in range(0, len(chosen), self._chunk):
            yield chosen[first : first + self._chunk]

    def _values(self, part: Index, layer: int) -> Array:
        """Return F through each candidate of `part`: [part, levels, states + 1]."""
        after = self._after[self.table.way[part]]
        if self.combine == "missing" and self.by_level is not None:
            return np.maximum(after, self.by_level[part][:, :, None])
        after = after + (self.weight[part][:, None] + self.penalty[part])[:, :, None]
        if self.entrance is not None:
            own = self.entrance.suffix._after[self.table.way[part]]
            own += self.entrance.crossing[part][:, None, None]
            own = np.maximum(own, 0.0) + self.entrance.weight[part][:, None, None]
            own[~self.entrance.mask[part]] = np.inf
            after = np.minimum(after, own)
        if self.floor is not None:
            after = np.maximum(after, self.floor[part][:, None, None])
        if self.extra_at_start is not None and layer == 0:
            after = after + self.extra_at_start[part][:, None, None]
        return after

    def replace(self, where: NDArray[np.bool_], value: float) -> None:
        """Set F to `value` at `where` [layers + 1, states], for use as an entrance's suffix."""
        self.value[:, :, :-1] = np.where(where[:, None, :], value, self.value[:, :, :-1])
        for layer in range(len(self.value)):
            self._pass_on(layer)

    def _pass_on(self, layer: int) -> None:
        """Set F after each kind of stage that stops at `layer`: rows of `_after`."""
        suffix = self.value[layer]
        for row, kind, extra in self.table.ways[layer]:
            shifted = np.full_like(suffix, np.inf)
            for level, new in enumerate(self.step[extra]):
                if new >= 0:
                    np.minimum(shifted[new], suffix[level], out=shifted[new])
            following = self.table.pool.following[kind]
            result = shifted[:, following[:, 0]]
            for choice in range(1, following.shape[1]):
                np.minimum(result, shifted[:, following[:, choice]], out=result)
            self._after[row] = result

    def final_levels(self) -> list[int]:
        """Return the levels that a whole plan may have."""
        wanted = self.table.problem.num_stages
        if wanted is None or self.merged:
            return list(range(self.value.shape[1]))
        return [v for v, level in enumerate(self.table.levels) if level.num_stages == wanted]

    def best(self) -> float:
        """Return the least F over all plans, inf if there is none."""
        levels = self.final_levels()
        return float(self.value[0, levels, 0].min()) if levels else math.inf

    def plan(self, level: int | None = None) -> list[int]:
        """Return the candidates of a plan that attains `best()` (or F at `level`), in order."""
        if level is None:
            levels = self.final_levels()
            level = levels[int(np.argmin(self.value[0, levels, 0]))]
        table = self.table
        layer, state = 0, 0
        result: list[int] = []
        while layer < table.problem.num_layers:
            parts = list(self._parts(layer))
            through = np.concatenate([self._values(p, layer)[:, level, state] for p in parts])
            pick = int(np.concatenate(parts)[int(np.argmin(through))])
            result.append(pick)
            stop = int(table.stop[pick])
            choices = table.pool.following[int(table.kind[pick])][state]
            before = [v for v, new in enumerate(self.step[table.extra[pick]]) if new == level]
            level, state = min(
                ((v, int(r)) for v in before for r in choices),
                key=lambda item: float(self.value[stop, item[0], item[1]]),
            )
            layer = stop
        return result


def tables_of(problem: StageProblem) -> list[StageTable]:
    """Return one table per microbatch count and schedule, on one shared pool of devices."""
    kinds = list(dict.fromkeys(candidate.submesh for candidate in problem.candidates))
    pool = DevicePool(problem.device_groups, kinds)
    by_count: dict[int, list[StageCandidate]] = {}
    for candidate in problem.candidates:
        by_count.setdefault(candidate.num_microbatches, []).append(candidate)
    return [
        StageTable(problem, candidates, schedule, pool)
        for _, candidates in sorted(by_count.items())
        for schedule in problem.schedules
        if not SCHEDULE_RULES[schedule].interleaves
    ]
