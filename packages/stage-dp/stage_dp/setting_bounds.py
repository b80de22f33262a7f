"""Bounds of settings: microbatch counts with their schedules.

A bound needs one sweep over (layer, free devices) first, then sharper floors of what bounds it,
then memory, then ranges of the slowest stage.                        -> SettingBounds.refine()
"""

from __future__ import annotations

import math

import numpy as np
from attrs import define

from stage_dp.joint_bound import CLOSE, Bounds, Chain, quick_bound, refined_bound
from stage_dp.joint_chain import Scored
from stage_dp.joint_costs import LEVELS, CountCosts, held_by_place
from stage_dp.joint_interleaved import Interleaving
from stage_dp.joint_links import Links
from stage_dp.joint_sweep import Space, Sweep
from stage_dp.schedules import ScheduleRule

# Times that sharper floors are asked for, per setting and with memory or without. With 4 and 40,
# GPT-1.3B on 4 V100 and 16 layers of 2560 on 8 have the same plan and bound.
MAX_ASKED = 12


@define(eq=False)
class Setting:
    """A microbatch count with a schedule, and what is known of it."""

    costs: CountCosts
    rule: ScheduleRule
    bound: float
    interleaving: Interleaving | None = None
    best: Scored | None = None
    first: Scored | None = None  # another to make better by small changes
    done: bool = False  # every pipeline that could be better was tried
    with_memory: bool = False  # the bound needs memory to rise further
    asked: int = 0  # times that sharper floors were asked for, with memory or without


class SettingBounds:
    """Bounds of pipelines of up to `most` stages on the devices of `space`. `final`: the numbers of
    stages that are asked for, None if any."""

    def __init__(
        self, links: Links, space: Space, most: int, final: tuple[int, ...] | None
    ) -> None:
        self.links, self.space, self.most, self.final = links, space, most, final

    def mean(self, costs: CountCosts, proof: bool) -> float:
        """Return the mean work of all devices."""
        return costs.bounds(proof).device_seconds(self.space).mean

    def work(self, costs: CountCosts, limit: float) -> float:
        """Return what the busiest mesh of a pipeline works at least, up to `limit` seconds."""
        bounds = self.of(costs, (), True, limit, 0)
        nothing = np.where(np.isfinite(bounds.seconds), 0.0, np.inf)
        sweep = Sweep(
            bounds.space,
            nothing,
            np.zeros_like(bounds.crossing),
            counted=bounds.counted,
            open_ended=bounds.open_ended,
            floor=bounds.busy,
            first_floor=bounds.busy,
            window=bounds.window,
        )
        return min(limit, sweep.best(self.final))

    def of(
        self, costs: CountCosts, held: tuple[int, ...], proof: bool, limit: float, num_delayed: int
    ) -> Bounds:
        """Return bounds of pipelines that take less than `limit` seconds."""
        found = costs.bounds(proof, held, limit, num_delayed)
        counted = self.final is not None or len(held) > 1
        arrays = [found.seconds, found.busy, found.once, found.delayed]
        if counted and arrays[0].shape[2] == 1:
            arrays = [np.repeat(a, self.most, axis=2) for a in arrays]
        least, far, most = self.links.crossings(costs.table, costs.meshes)
        levels = arrays[0].shape[2]
        open_ended = counted and self.final is None and levels < self.most
        return Bounds(
            space=self.space,
            num_microbatches=costs.table.num_microbatches,
            seconds=arrays[0],
            busy=arrays[1],
            once=arrays[2],
            delayed=arrays[3],
            crossing=self.space.crossing(least, far),
            longest=most,
            share=costs.share,
            parts=found.parts,
            counted=counted,
            open_ended=open_ended,
            final=self.final,
            window=found.device_seconds(self.space).window(limit),
        )

    def held(self, setting: Setting) -> tuple[int, ...]:
        """Return the microbatches in flight of the levels that bounds tell apart."""
        held = held_by_place(setting.rule, setting.costs.table.num_microbatches, self.most)
        if self.final is not None:
            return held
        return held[:1] if len(set(held)) == 1 else held[:LEVELS]

    def quick(
        self, setting: Setting, held: tuple[int, ...], proof: bool, limit: float
    ) -> tuple[float, list[Chain]]:
        """Return the quick bound, up to `limit`, and its pipelines where that takes less; worked
        out once for all schedules that do not split the backward."""
        costs, rule = setting.costs, setting.rule
        delayed = rule.least_delayed
        known = costs.bounds(proof, held, limit, delayed).quick
        value, chains, up_to = known.get(rule.splits_backward, (0.0, [], 0.0))
        if not chains and up_to < limit:
            value, chains = quick_bound(self.of(costs, held, proof, limit, delayed), rule)
            known[rule.splits_backward] = value, chains, limit
        return min(value, limit), chains

    def refine(self, setting: Setting, target: float, limit: float) -> bool:
        """Raise the bound of a setting, up to `target`; return whether that is reached. Seconds
        from `limit` on do not matter."""
        costs, rule = setting.costs, setting.rule
        if setting.interleaving is not None:
            setting.bound = max(setting.bound, setting.interleaving.refined(target, limit))
            return setting.bound >= target
        near = target * (1 - CLOSE)
        while setting.bound < near:
            held = self.held(setting) if setting.with_memory else ()
            value, chains = self.quick(setting, held, True, limit)
            setting.bound = max(setting.bound, value)
            if setting.bound >= near:
                break
            setting.asked += 1
            delayed = rule.least_delayed
            if setting.asked <= MAX_ASKED and costs.ask(chains, held, delayed):
                continue
            if setting.with_memory:
                bounds = self.of(costs, held, True, target, delayed)
                refined, chains = refined_bound(bounds, rule, setting.bound, target)
                setting.bound = max(setting.bound, min(refined, target))
                if setting.bound >= near:
                    return True
                if setting.asked > MAX_ASKED or not costs.ask(chains, held, delayed):
                    return False
                continue
            setting.with_memory, setting.asked = True, 0
        return True

    def covers(self, setting: Setting) -> bool:
        """Return whether any chain of meshes would do with enough memory."""
        if setting.interleaving is not None:
            return math.isfinite(setting.interleaving.bound())
        return bool(quick_bound(self.of(setting.costs, (), True, math.inf, 0), setting.rule)[1])
