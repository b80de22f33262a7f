"""All pipelines of one microbatch count and schedule that can still beat a plan in hand.

Goes from the last stage to the first, so that the microbatches in flight are known, over the fronts
of cell_fronts.py. A part of a pipeline is dropped when the bound of joint_bound.py's module
docstring for it, with the layers before it at their fastest, is no better than the plan in hand.
"""

from __future__ import annotations

import math

import numpy as np
from attrs import frozen

from stage_dp.cell_fronts import Front, Fronts, TooManyLabelsError
from stage_dp.device_pool import DevicePool
from stage_dp.joint_chain import Scored, StageChoice, score
from stage_dp.joint_links import Links
from stage_dp.menu_table import (
    ACTIVATION,
    BACKWARD,
    DELAYED,
    FORWARD,
    STATE,
    STEP,
    TRANSIENT,
    MenuTable,
)
from stage_dp.schedules import ScheduleRule

BATCH = 512  # pipelines scored together


@frozen
class Part:
    """The last stages of a pipeline.

    `bound` holds for every pipeline that ends with them, `span` for the time from the first forward
    of the first of them to its last backward; `path` is the way of one microbatch there and back.
    """

    bound: float = 0.0
    span: float = 0.0
    path: float = 0.0


class OutOfWorkError(Exception):
    """The limit on the work of an enumeration is reached."""


class Budget:
    """Stages that may still be tried, over all enumerations of a search."""

    def __init__(self, stages: int) -> None:
        self.left = stages

    def spend(self, stages: int) -> None:
        """Count `stages`; raises OutOfWorkError when there are none left."""
        self.left -= stages
        if self.left < 0:
            raise OutOfWorkError


class Enumeration:
    """`run()` tries all pipelines of a table and a schedule better than `limit` seconds."""

    def __init__(
        self,
        table: MenuTable,
        rule: ScheduleRule,
        fronts: Fronts,
        pool: DevicePool,
        links: Links,
        budget: Budget,
        limit: float,
    ) -> None:
        self.table, self.rule, self.fronts = table, rule, fronts
        self.pool, self.links, self.budget = pool, links, budget
        self.limit = limit
        self.best: Scored | None = None
        self._waiting: list[tuple[StageChoice, ...]] = []
        self._fastest = np.concatenate([[0.0], np.cumsum(self._fastest_layers())])

    def run(self) -> tuple[Scored | None, bool]:
        """Return the best pipeline found below the limit, and whether all were tried."""
        everything = frozenset({0})
        complete = True
        try:
            self._extend(self.table.problem.menu.num_layers, everything, (), Part())
        except (OutOfWorkError, TooManyLabelsError):
            complete = False
        self._score_waiting()
        return self.best, complete

    def _fastest_layers(self) -> list[float]:
        result = []
        for c in self.table.problem.menu.class_of_layer:
            figures = [rows[c].columns for rows in self.table.rows if len(rows[c].number)]
            parts = [FORWARD] if self.rule.splits_backward else [FORWARD, BACKWARD]
            seconds = [float(f[:, parts].sum(axis=1).min()) for f in figures]
            result.append(min(seconds, default=math.inf))
        return result

    def _score_waiting(self) -> None:
        found = score(self._waiting, self.rule, self.table, self.links)
        self._waiting.clear()
        if found is not None and found.step_seconds < self.limit * (1 - 1e-12):
            self.best, self.limit = found, found.step_seconds

    def _extend(
        self,
        layer: int,
        states: frozenset[int],
        after: tuple[StageChoice, ...],
        part: Part,
    ) -> None:
        """Try all stages that stop at `layer` before the stages `after`, with figures `part`."""
        problem = self.table.problem
        if layer == 0:
            if problem.num_stages not in (None, len(after)):
                return
            if problem.use_all_devices and not any(self.pool.free[s] == 0 for s in states):
                return
            self._waiting.append(after)
            if len(self._waiting) >= BATCH:
                self._score_waiting()
            return
        if problem.num_stages is not None and len(after) >= problem.num_stages:
            return
        sequences = self.fronts.sequences
        for mesh, menu in enumerate(problem.menu.meshes):
            kind = self.pool.kinds.index(menu.submesh)
            reached = frozenset(
                int(s) for state in states for s in self.pool.following[kind][state]
            ) - {self.pool.dead}
            if not reached:
                continue
            for start in range(layer):
                sequence = int(sequences.number[start, layer])
                front = self.fronts.front(sequence, mesh)
                self.budget.spend(1 + len(front.columns))
                for label, longer in self._promising(front, mesh, start, after, part):
                    if longer.bound >= self.limit * (1 - 1e-12):
                        continue
                    stage = StageChoice(
                        start,
                        layer,
                        mesh,
                        front.columns[label],
                        int(front.layout_in[label]),
                        int(front.layout_out[label]),
                        self.fronts.rows(sequence, mesh, label),
                    )
                    self._extend(start, reached, (stage, *after), longer)

    def _promising(
        self,
        front: Front,
        mesh: int,
        start: int,
        after: tuple[StageChoice, ...],
        part: Part,
    ) -> list[tuple[int, Part]]:
        """Return labels that fit, least bound first, with the figures of the longer part."""
        columns = front.columns
        count = self.table.num_microbatches
        place = len(after) + 1
        held = self.rule.least_at(place, count)
        need = columns[:, STATE] + held * columns[:, ACTIVATION] + columns[:, TRANSIENT]
        need = need + self.rule.least_delayed * columns[:, DELAYED]
        seconds = columns[:, FORWARD] + columns[:, BACKWARD]
        crossing = np.zeros(len(columns))
        if after:
            near, layout = after[0].mesh, after[0].layout_in
            crossing = np.array(
                [
                    self.links.least(mesh, int(y), near, layout, self.table.samples)
                    for y in front.layout_out
                ]
            )
        busy = count * seconds
        way = 2 * crossing + part.path
        if self.rule.splits_backward:
            # Counted to the end of all work, by weight too: there is no way back to wait for.
            span = np.maximum(busy, columns[:, FORWARD] + crossing + part.span)
            bound = np.maximum(span, busy + columns[:, STEP]) + self._fastest[start]
            bound = np.maximum(bound, part.bound)
        else:
            if self.rule.all_first:
                busy = busy + way
            elif not self.rule.flexible and held < count:
                busy = busy + np.maximum(2 * way - (held - 1) * seconds, 0.0)
            span = np.maximum(busy, seconds + 2 * crossing + part.span)
            bound = np.maximum(span + self._fastest[start], part.bound)
            bound = np.maximum(bound, count * seconds + columns[:, STEP])
            if start == 0:
                bound = np.maximum(bound, span + columns[:, STEP])
        keep = np.flatnonzero((need <= self.table.memory[mesh]) & np.isfinite(crossing))
        keep = keep[np.argsort(bound[keep], kind="stable")]
        return [
            (int(n), Part(float(bound[n]), float(span[n]), float(seconds[n] + way[n])))
            for n in keep
        ]
