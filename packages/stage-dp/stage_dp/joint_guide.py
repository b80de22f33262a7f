"""Good pipelines of one microbatch count and schedule, by bounds made exact where they are met.

The sum of a_i plus the largest b_i (-> joint_schedules.py) is minimised over bounds of all stages:
for a limit on b, a sweep gives the least sum; limits are bisected best bound first. The stages of
the pipeline found are then solved exactly (rows within memory), their bounds are replaced by what
came out, and the search is repeated until it meets only exact stages: then the pipeline is optimal
for this objective, although few stages were solved.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from stage_dp.joint_chain import Scored, StageChoice, rows_by_limit, score
from stage_dp.joint_costs import LEVELS, CountCosts, held_by_place
from stage_dp.joint_links import Links
from stage_dp.joint_sweep import Sweep
from stage_dp.menu_table import BACKWARD, FEW_LAYERS, FORWARD, STEP, Array
from stage_dp.schedules import ScheduleRule

MAX_SWEEPS = 6  # per search over limits
# Beyond the best plan, of pipelines that are kept to be made better by small changes. With 0.2 % a
# perceptron of 4 layers on 16 V100 missed a plan that is 3 % faster. Few layers change more: with
# 10 % one of 8 with 69 MB each missed a plan that is 5 % faster, made of one 20 % beyond the best,
# in 2.5 instead of 2.8 CPU s.
NEAR, NEAR_OF_FEW = 0.1, 0.25
# Share of the step that a stage's update takes, from which pipelines are also looked for whose
# stages take at most a part of that. The objective adds updates to the work of their own stages,
# while all stages end with the slowest one: Wide-ResNet-13B on 64 V100 had one of 11 %, and was
# 1.4 % slower than Megatron's grid.
LONG_UPDATE, PART = 0.02, 0.25
SHARE_FORWARD = 1 / 3  # of a stage's time where only the whole is known (three products in all)

Chain = list[tuple[int, int, int]]


class Guide:
    """Searches pipelines of `costs` under `rule`. `most` [stages]: the largest number of stages.

    `crossing` [layers + 1, kinds, states + 1]: seconds one way after a stage, by the layer where it
    stops and the free devices before it.
    """

    def __init__(
        self,
        costs: CountCosts,
        rule: ScheduleRule,
        links: Links,
        crossing: Array,
        most: int,
        final: tuple[int, ...] | None,
        rules: tuple[ScheduleRule, ...],
    ) -> None:
        self.costs, self.links = costs, links
        assert rule.pace is not None
        self.pace = rule.pace
        self.crossing, self.final, self.rules = crossing, final, rules
        self.all_held = held_by_place(rule, costs.table.num_microbatches, most)
        self.delayed = rule.least_delayed
        self.near = 1 + (NEAR if costs.space.num_layers > FEW_LAYERS else NEAR_OF_FEW)
        self.most = most if final else min(most, LEVELS)
        self.open_ended = self.most < most
        self.held = self.all_held[: self.most]
        self.binding = False  # whether memory is looked at in the sweeps
        # By schedule, the best pipeline before those with short updates were looked for.
        self.first: dict[str, Scored] = {}
        self._start(math.inf)

    def _start(self, limit: float) -> None:
        """Set the objective's terms from bounds of pipelines of less than `limit` seconds."""
        if self.binding and len(set(self.held)) == 1 and self.final is None:
            bounds = self.costs.bounds(False, self.held[:1], limit, self.delayed)
        else:
            held, delayed = (self.held, self.delayed) if self.binding else ((), 0)
            bounds = self.costs.bounds(False, held, limit, delayed)
        counted = self.final is not None or (self.binding and len(set(self.held)) > 1)
        seconds, busy = bounds.seconds, bounds.busy
        if counted and seconds.shape[2] == 1:
            seconds = np.repeat(seconds, self.most, axis=2)
            busy = np.repeat(busy, self.most, axis=2)
        count = self.costs.table.num_microbatches
        near = self.crossing[1:-1].min(axis=(0, 2), initial=np.inf)[None, :, None]
        with np.errstate(invalid="ignore"):
            pace = self.pace(
                seconds * SHARE_FORWARD, seconds * (1 - SHARE_FORWARD), np.minimum(near, 1e9)
            )
            slow = busy - seconds + (count - 1) * (pace - seconds)
            once = busy - count * seconds
        self.taken = bounds.device_seconds(self.costs.space)
        self.sum = seconds.copy()
        self.slow = np.where(np.isfinite(seconds), slow, np.inf)
        self.once = np.where(np.isfinite(seconds), once, np.inf)
        self.exact = np.zeros(seconds.shape, dtype=bool)
        self.counted = counted

    def run(self, rounds: int, limit: float) -> dict[str, Scored]:
        """Return the best pipelines met by schedule, in at most so many rounds.

        Pipelines are scored under all of `rules`; those with more than `limit` seconds are not
        looked for.
        """
        best: dict[str, Scored] = {}
        longest = math.inf  # that an update may take
        for number in range(rounds):
            found = self._least(limit * self.near)
            if longest < math.inf:
                found += self._least(limit * self.near, longest)
            if not found:
                break
            new = False
            for chain in found:
                new |= self._solve(chain)
            rows = [c for chain in found for c in self._rows(chain)]
            for rule in self.rules:
                known = best[rule.name].step_seconds if rule.name in best else math.inf
                scored = score(
                    rows,
                    rule,
                    self.costs.table,
                    self.links,
                    quick=True,
                    limit=min(known, limit * self.near),
                )
                if scored is not None and scored.step_seconds < known:
                    best[rule.name] = scored
                    limit = min(limit, scored.step_seconds)
            leader = min(best.values(), key=lambda one: one.step_seconds, default=None)
            if leader is not None and longest == math.inf:
                update = max(float(stage.columns[STEP]) for stage in leader.stages)
                if update > LONG_UPDATE * leader.step_seconds:
                    longest, new, self.first = PART * update, True, dict(best)
            if not new:
                break
            if not self.binding and number == 0 and self._starved(found[0]):
                self.binding = True
                self._start(limit * self.near)
                for chain in found:
                    self._solve(chain)
        return best

    def _starved(self, chain: Chain) -> bool:
        """Return whether memory makes the stages of `chain` slower than their bounds."""
        loose = self.costs.bounds(False).seconds
        for place, (start, stop, kind) in enumerate(reversed(chain), 1):
            choices = self._choices(start, stop, kind, place)
            number = self.costs.space.sequences.number[start, stop]
            least = min((c.seconds for c in choices), default=math.inf)
            if least > loose[number, kind, 0] * (1 + 1e-6):
                return True
        return False

    def _solve(self, chain: Chain) -> bool:
        """Make the stages of `chain` exact; return whether any was not."""
        new = False
        count = self.costs.table.num_microbatches
        near = self.crossing[1:-1].min(axis=(0, 2), initial=np.inf)
        for place, (start, stop, kind) in enumerate(reversed(chain), 1):
            level = min(place, self.most) - 1 if self.counted else 0
            number = int(self.costs.space.sequences.number[start, stop])
            if self.exact[number, kind, level]:
                continue
            new = True
            self.exact[number, kind, level] = True
            choices = self._choices(start, stop, kind, place)
            if not choices:
                self.sum[number, kind, level] = self.slow[number, kind, level] = np.inf
                self.once[number, kind, level] = np.inf
                continue
            figures = np.array([c.columns for c in choices])
            crossing = np.full(len(choices), 0.0 if not np.isfinite(near[kind]) else near[kind])
            pace = self.pace(figures[:, FORWARD], figures[:, BACKWARD], crossing)
            slow = (count - 1) * pace + figures[:, STEP]
            self.sum[number, kind, level] = (figures[:, FORWARD] + figures[:, BACKWARD]).min()
            self.slow[number, kind, level] = slow.min()
            self.once[number, kind, level] = figures[:, STEP].min()
        return new

    def _least(self, limit: float, longest: float = math.inf) -> list[Chain]:
        """Return pipelines with the least objective, best first, of stages whose updates take at
        most `longest` seconds."""
        slow = np.where(self.once <= longest, self.slow, np.inf)
        values = np.unique(slow[np.isfinite(slow) & (slow < limit)])
        if not len(values):
            return []
        found: dict[tuple[tuple[int, int, int], ...], float] = {}
        window = self.taken.window(limit)

        def solve(number: int) -> tuple[float, float]:
            weight = np.where(slow <= values[number], self.sum, np.inf)
            sweep = Sweep(
                self.costs.space,
                weight,
                2 * self.crossing,
                counted=self.counted,
                open_ended=self.open_ended,
                window=window,
            )
            total = sweep.best(self.final)
            if not math.isfinite(total):
                return math.inf, math.inf
            chain = sweep.chain(self.final)
            slowest = 0.0
            for place, (start, stop, kind) in enumerate(reversed(chain), 1):
                level = min(place, self.most) - 1 if self.counted else 0
                number = int(self.costs.space.sequences.number[start, stop])
                slowest = max(slowest, float(self.slow[number, kind, level]))
            found[tuple(chain)] = total + slowest
            return total, slowest

        value, slowest = solve(len(values) - 1)
        if math.isinf(value):
            return []
        best = value + slowest
        stop = int(np.searchsorted(values, slowest)) - 1
        heap = [(value + float(values[0]), 0, stop, value)] if stop >= 0 else []
        for _ in range(MAX_SWEEPS):
            if not heap or heap[0][0] >= best * (1 - 1e-4):
                break
            _, low, high, least = heapq.heappop(heap)
            # By value: limits crowd where stages are many.
            middle = int(np.searchsorted(values, (values[low] + values[high]) / 2))
            middle = min(max(middle, low), max(high - 1, low))
            value, slowest = solve(middle)
            if math.isfinite(value):
                best = min(best, value + slowest)
                stop = int(np.searchsorted(values, slowest)) - 1
                if stop >= low:
                    heapq.heappush(heap, (value + float(values[low]), low, stop, value))
            if middle < high:
                bound = least + float(values[middle + 1])
                heapq.heappush(heap, (bound, middle + 1, high, least))
        ranked = sorted(found.items(), key=lambda item: item[1])
        return [list(chain) for chain, _ in ranked[:4]]

    def _rows(self, chain: Chain) -> list[list[StageChoice]]:
        """Return choices of rows for `chain`, with and without a limit on the slowest stage."""
        num = len(chain)
        options = [
            self._choices(start, stop, kind, num - n) for n, (start, stop, kind) in enumerate(chain)
        ]
        if not all(options):
            return []
        table = self.costs.table
        return rows_by_limit(options, self.links, table.num_microbatches, table.samples)

    def _choices(self, start: int, stop: int, kind: int, place: int) -> list[StageChoice]:
        return self.costs.choices(start, stop, kind, self.all_held[place - 1], self.delayed)
