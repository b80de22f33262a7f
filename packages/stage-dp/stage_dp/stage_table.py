"""The recurrences of stage construction, for one microbatch count B and one schedule.

A plan cuts layers 0..L into stages; stage i runs a candidate of t_i = forward + backward seconds per
microbatch, c_i seconds one way to the next stage (0 for the last), u_i seconds of synchronisation and
update per step. All sweeps go from the last layer to the first over states (layer l, level v, free
devices r); the *level* says how many microbatches the suffix's first stage holds in flight (and, where
the number of stages is fixed, how many stages the suffix has).

    cheapest(M):  F(l, v, r) = min over candidates of l..k with bottleneck <= M, memory for level v,
                  submesh s of  cost + F(k, v before, r - s)
    leaking():    the same with max(missing bytes, .) in place of the sum: the least missing memory
    bound():      W(l, r) = min max(B t, t + 2c + W(k, r - s)), the time from the first forward to
                  the last backward of a suffix, with every t replaced by its lower bound

with cost a_i and bottleneck b_i of a stage such that sum a_i + max b_i is the step time of a pipeline
whose slowest stage sets the pace (Alpa's formula for c = u = 0). The pace of each schedule follows the
steady-state law in schedules.py for two neighbouring stages:

    schedule     a_i          b_i
    1f1b         t + 2c       (B-1) (t + c) + u
    eager-1f1b   t + 2c       (B-1) max(t, c, (2t + 2c) / 3) + u
    adaptive     t + 2c       (B-1) max(t, c) + u
    gpipe        t + 2c       (B-1) (max(f, c) + max(b, c)) + u
    sequential   B (t + 2c)   u
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from alpa_interchange.stage import StageCandidate, StageProblem
from attrs import frozen
from numpy.typing import NDArray

from stage_dp.device_pool import DevicePool
from stage_dp.schedules import extra_in_flight

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@frozen
class Level:
    """In-flight microbatches of a suffix's first stage, and the suffix's stages if that is fixed."""

    in_flight: int
    num_stages: int


def first_level(schedule: str, num_microbatches: int, counted: bool) -> Level:
    """Return the level of the empty suffix."""
    fixed = {"gpipe": num_microbatches, "sequential": 1}
    return Level(fixed.get(schedule, 0), 0)


def next_level(
    level: Level, schedule: str, num_microbatches: int, extra: int, counted: bool
) -> Level:
    """Return the level after one more stage in front; `extra` is for "adaptive"."""
    k = level.in_flight
    if schedule == "1f1b":
        k += 1
    elif schedule == "eager-1f1b":
        k += 1 if k == 0 else 2
    elif schedule == "adaptive":
        k += 1 + (extra if k else 0)
    return Level(min(k, num_microbatches), level.num_stages + 1 if counted else 0)


class StageTable:
    """Candidates of one microbatch count as arrays, sorted by their first layer.

    `cost`, `bottleneck`: [candidates], seconds, as in the module docstring. `holds`: [candidates], the
    most microbatches in flight that fit in memory. `by_layer[l]`: candidate numbers that start at l.
    """

    def __init__(
        self,
        problem: StageProblem,
        candidates: Sequence[StageCandidate],
        schedule: str,
        pool: DevicePool,
    ) -> None:
        self.problem = problem
        self.candidates = tuple(candidates)
        self.schedule = schedule
        self.num_microbatches = candidates[0].num_microbatches
        self.pool = pool
        num = self.num_microbatches
        last = np.array([c.layer_stop == problem.num_layers for c in candidates])
        self.forward = np.array([c.forward_seconds for c in candidates])
        self.backward = np.array([c.backward_seconds for c in candidates])
        self.crossing = np.where(last, 0.0, [c.boundary_seconds for c in candidates])
        self.update = np.array([c.step_seconds for c in candidates])
        seconds, crossing = self.forward + self.backward, self.crossing
        self.least = np.minimum(seconds, [c.lower_bound_seconds for c in candidates])
        pace = {
            "1f1b": seconds + crossing,
            "eager-1f1b": np.maximum(np.maximum(seconds, crossing), (seconds + crossing) * 2 / 3),
            "adaptive": np.maximum(seconds, crossing),
            "gpipe": np.maximum(self.forward, crossing) + np.maximum(self.backward, crossing),
            "sequential": np.zeros_like(seconds),
        }[schedule]
        self.cost = (seconds + 2 * crossing) * (num if schedule == "sequential" else 1)
        self.bottleneck = (num - 1) * pace + self.update
        self.extra = [
            extra_in_flight(c, t) if schedule == "adaptive" and t > 0 else 0
            for c, t in zip(crossing.tolist(), seconds.tolist(), strict=True)
        ]
        memory = [problem.device_groups[c.submesh.host_group].memory for c in candidates]
        self.memory = np.array(memory)
        self.state = np.array([c.state_bytes + c.transient_bytes for c in candidates])
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
        self._set_levels()

    def _set_levels(self) -> None:
        """Number the levels that a suffix can have, with and without regard to memory."""
        counted = self.problem.num_stages is not None
        most = self.problem.num_stages or min(self.problem.num_layers, self.most_stages())
        extras = sorted(set(self.extra))
        empty = first_level(self.schedule, self.num_microbatches, counted)
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

    def most_stages(self) -> int:
        """Return an upper bound on the stages that fit on the devices."""
        total = sum(g.num_hosts * g.devices_per_host for g in self.problem.device_groups)
        smallest = min(c.submesh.num_devices for c in self.candidates)
        return max(1, total // smallest)

    def missing(self, in_flight: NDArray[np.int64]) -> Array:
        """Return the bytes beyond each device's memory: [candidates, len(in_flight)]."""
        need = self.state[:, None] + self.activation[:, None] * in_flight[None, :]
        return np.maximum(0.0, need - self.memory[:, None] * (1 + 1e-12))


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
    ) -> None:
        self.table = table
        self.weight = weight
        self.combine = combine
        self.floor = floor
        self.extra_at_start = extra_at_start
        self.allowed = allowed
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
        self.value[layers, 0, : pool.num_states] = (
            np.where(pool.empty, 0.0, np.inf) if problem.use_all_devices else 0.0
        )
        self._after: dict[tuple[int, int, int], Array] = {}
        extras = np.array(table.extra)
        for layer in range(layers - 1, -1, -1):
            chosen = table.by_layer[layer]
            chosen = chosen[allowed[chosen]]
            if not len(chosen):
                continue
            for first in range(0, len(chosen), 64):
                part = chosen[first : first + 64]
                values = self._values(part, extras[part], layer)
                np.minimum(self.value[layer], values.min(axis=0), out=self.value[layer])

    def _values(self, part: Index, extras: NDArray[np.int64], layer: int) -> Array:
        """Return F through each candidate of `part`: [part, levels, states + 1]."""
        table = self.table
        after = np.stack(
            [
                self._following(int(table.stop[c]), int(table.kind[c]), int(e))
                for c, e in zip(part, extras, strict=True)
            ]
        )
        if self.combine == "missing" and self.by_level is not None:
            return np.maximum(after, self.by_level[part][:, :, None])
        after = after + (self.weight[part][:, None] + self.penalty[part])[:, :, None]
        if self.floor is not None:
            after = np.maximum(after, self.floor[part][:, None, None])
        if self.extra_at_start is not None and layer == 0:
            after = after + self.extra_at_start[part][:, None, None]
        return after

    def _following(self, stop: int, kind: int, extra: int) -> Array:
        """Return F of the suffix after a stage on submesh `kind`: [levels of the stage, states + 1]."""
        key = (stop, kind, extra)
        if key not in self._after:
            suffix = self.value[stop]
            shifted = np.full_like(suffix, np.inf)
            for level, new in enumerate(self.step[extra]):
                if new >= 0:
                    np.minimum(shifted[new], suffix[level], out=shifted[new])
            following = self.table.pool.following[kind]
            result = shifted[:, following[:, 0]]
            for choice in range(1, following.shape[1]):
                np.minimum(result, shifted[:, following[:, choice]], out=result)
            self._after[key] = result
        return self._after[key]

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
        """Return candidate numbers of a plan that attains `best()` (or F at `level`), first to last."""
        if level is None:
            levels = self.final_levels()
            level = levels[int(np.argmin(self.value[0, levels, 0]))]
        table = self.table
        layer, state = 0, 0
        result: list[int] = []
        extras = np.array(table.extra)
        while layer < table.problem.num_layers:
            chosen = table.by_layer[layer]
            chosen = chosen[self.allowed[chosen]]
            through = np.concatenate(
                [
                    self._values(chosen[k : k + 64], extras[chosen[k : k + 64]], layer)[
                        :, level, state
                    ]
                    for k in range(0, len(chosen), 64)
                ]
            )
            pick = int(chosen[int(np.argmin(through))])
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
