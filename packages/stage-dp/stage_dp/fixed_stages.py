"""Pipelines whose stages, microbatches and schedule are given; their rows are chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from alpa_interchange.menu import JointPlan
from stage_dp.joint_chain import Scored, StageChoice, score
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.menu_table import MenuTable
from stage_dp.schedules import SCHEDULE_RULES, ScheduleRule

FEW_CHAINS = 64  # of rows of all stages that are tried at once; more are improved stage by stage


@frozen
class Known:
    """A pipeline to start from: its stages as (first layer, stop, mesh); rows are chosen.

    `num_meshes`: submeshes that run several stages each, in turn; None: one per stage.
    """

    stages: tuple[tuple[int, int, int], ...]
    num_microbatches: int
    schedule: str
    num_meshes: int | None = None

    @classmethod
    def of(cls, plan: JointPlan) -> Known:
        """Return the stages, microbatches and schedule of a plan."""
        stages = tuple((s.layer_start, s.layer_stop, s.mesh) for s in plan.stages)
        interleaves = SCHEDULE_RULES[plan.schedule].interleaves
        num_meshes = plan.num_meshes if interleaves else None
        return cls(stages, plan.num_microbatches, plan.schedule, num_meshes)

    @classmethod
    def rivals(cls, plan: JointPlan, within: float) -> list[Known]:
        """Return the best pipelines met at other microbatch counts and schedules by the search for
        `plan`, those that take up to `within` of its seconds, best first."""
        found = sorted(
            (one.step_seconds, number)
            for number, one in enumerate(plan.tried)
            if one.step_seconds is not None and one.step_seconds <= within * plan.step_seconds
        )
        tried = [plan.tried[number] for _, number in found]
        return [cls(t.stages, t.num_microbatches, t.schedule, t.num_meshes) for t in tried]


def with_rows(
    plan: JointPlan, costs: CountCosts, rule: ScheduleRule, links: Links
) -> Scored | None:
    """Return a plan with the rows it has, None if it does not fit or a row is not of use."""
    class_of_layer, stages = links.problem.menu.class_of_layer, []
    for stage in plan.stages:
        own = class_of_layer[stage.layer_start : stage.layer_stop]
        picks = [
            np.flatnonzero(costs.table.rows[stage.mesh][c].number == row)
            for c, row in zip(own, stage.rows, strict=True)
        ]
        if not all(map(len, picks)):
            return None
        chosen = costs.stage(stage.mesh, own, tuple(int(at[0]) for at in picks))
        stages.append(chosen.at(stage.layer_start, stage.layer_stop))
    return score([stages], rule, costs.table, links)


def fixed_stages(
    stages: Sequence[tuple[int, int, int]],
    costs: CountCosts,
    rule: ScheduleRule,
    links: Links,
    limit: float = math.inf,
) -> Scored | None:
    """Return the pipeline of these stages (first layer, stop, mesh) with the best rows found, None
    if none takes less than `limit` seconds."""
    found = _best(_options(stages, costs, rule), rule, costs.table, links, limit)
    return found if found is not None and found.step_seconds < limit else None


def _options(
    stages: Sequence[tuple[int, int, int]], costs: CountCosts, rule: ScheduleRule
) -> list[list[StageChoice]]:
    """Return the rows to try for each stage: best for its pace, its whole work, its once-a-step."""
    count, found = costs.table.num_microbatches, []
    for place, (start, stop, mesh) in enumerate(stages):
        held = rule.least_at(len(stages) - place, count)
        ways = (
            costs.best(start, stop, mesh, held, weight, rule.least_delayed)
            for weight in (0.0, 1 / count, 1.0)
        )
        distinct = {way.rows: way for way in ways if way is not None}
        found.append(list(distinct.values()))
    return found


def _best(
    options: list[list[StageChoice]],
    rule: ScheduleRule,
    table: MenuTable,
    links: Links,
    limit: float,
) -> Scored | None:
    if not all(options):
        return None
    if math.prod(map(len, options)) <= FEW_CHAINS:
        return score(itertools.product(*options), rule, table, links, limit=limit)
    found = score(
        [tuple(ways[min(k, len(ways) - 1)] for ways in options) for k in range(3)],
        rule,
        table,
        links,
    )
    for place, ways in enumerate(options):
        if found is not None and len(ways) > 1:
            before, after = found.stages[:place], found.stages[place + 1 :]
            found = score([(*before, way, *after) for way in ways], rule, table, links) or found
    return found
