"""One search over layer ranges, meshes, rows per layer, microbatch counts and schedules.

For every microbatch count and schedule, called a *setting*:

    1. a bound that needs one sweep over (layer, free devices)        -> joint_bound.quick_bound()
    2. in the order of bounds, a guided search for good pipelines     -> joint_guide.py
    3. finer bounds, until they reach the best plan                   -> setting_bounds.py
    4. all pipelines that could still be better, if they are few      -> joint_enumeration.py

A setting whose bound reaches the best plan is done. Where step 4 ends for all settings the plan is
optimal for the exact longest path; else the bound says how far it may be off. All limits are
counts of work, so that plans repeat, unless the problem has a deadline.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence

from attrs import evolve

from alpa_interchange.menu import JointPlan, JointProblem, TriedCount
from alpa_interchange.mesh import SubmeshSpec
from stage_dp.cell_fronts import Fronts
from stage_dp.device_pool import CoarsePool, DevicePool, nested
from stage_dp.fixed_stages import Known, fixed_stages, with_rows
from stage_dp.infeasibility import InfeasibleError, check_bound
from stage_dp.joint_chain import Scored, score
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_enumeration import Budget, Enumeration
from stage_dp.joint_guide import Guide
from stage_dp.joint_improvement import Improvement, Rows, Work
from stage_dp.joint_interleaved import Interleaving, best_interleaved
from stage_dp.joint_links import Links
from stage_dp.joint_plan import plan_of
from stage_dp.joint_schedules import SEARCHED
from stage_dp.joint_sweep import Space
from stage_dp.menu_table import FEW_LAYERS, AskedFloors, MenuTable, Sequences
from stage_dp.schedules import SCHEDULE_RULES, ScheduleRule, rule_in_slices
from stage_dp.setting_bounds import Setting, SettingBounds

# Of the least mean work of all devices: seconds up to which pipelines are looked at before there is
# one. Those that take longer are looked at where none does not, which is done twice then: GPT-175B
# batch 4096 on 4,096 A100 takes 22.5 CPU s with 1.25, 20.6 with 1.5, 15.6 with 2 and 16.9 with 3,
# GPT-39B on 64 V100 5.8, 3.7, 3.6 and 3.5, GPT-175B on 1,024 A100 29.8, 20.3, 21.5 and 19.9; 24
# and 96 layers on 8 V100, LLaMA-8B and GPT-1.3B are the same from 1.5 on. Plans and bounds are too.
REACH = 2.0
ROUNDS = 3  # of the guided search per microbatch count
# States of free devices; above, devices are counted in units. With 80 for several groups too,
# the bound gave 12 of 16 A100 and 16 V100 away as parts of units: GPT-2.6B had a gap of 34.7 %,
# not 3.2 %, in 47 instead of 64 CPU s.
MAX_STATES, MAX_STATES_OF_GROUPS = 80, 300
ENUMERATED_LAYERS = 10  # of more layers there are too many pipelines
STAGES_TRIED = 60_000  # stages of the enumeration in all, some 2 s
GUIDES = ("1f1b", "eager-1f1b")  # schedules that guide, by preference
IMPROVED = 6  # settings whose best plans are made better by small changes
POLISHED = 2  # of them whose rows are solved nearly exactly
# Of `worth`: pipelines that take longer are not improved, as small changes of stages do not gain so
# much. The value is that of `joint_interleaved.NEAR`; others were not tried.
IMPROVABLE = 1.1
# Stages solved nearly exactly beside each of them: a border 1 % off in rows is often one layer off.
# Without, Swin-32 with 8 GB (benchmarks/stage_dp_galvatron.py) is 0.15 % slower; transformers of 24
# to 96 layers are the same with 0, 8 and 16, which take as long within the noise.
POLISHED_STAGES = 8
STAGES_SOLVED = (1500, 16)  # stages solved for that, of few layers and of more
# Share by which the least bound is raised above the next one at a time.
RAISED = 3e-3
LABELS = 40_000  # labels of the enumeration per microbatch count


def microbatch_counts(batch_size: int) -> tuple[int, ...]:
    """Return the numbers of equal microbatches that `batch_size` examples can be cut into."""
    return tuple(count for count in range(1, batch_size + 1) if batch_size % count == 0)


def solve_joint(
    problem: JointProblem,
    *known: Known | JointPlan,
    enough: float = math.inf,
    worth: float = math.inf,
) -> JointPlan:
    """Return the pipeline with the least predicted step time, with its proven lower bound.

    It is no slower than the pipelines that are `known`, which make the search shorter: stages, or
    a plan from the same menu, perhaps of other memory or links. Those that do not fit are passed
    over. A bound of `enough` seconds is not raised further: it is that of other plans, beside which
    a higher one would prove nothing more. Once there is a pipeline, better ones are looked for only
    where they may take less than `worth` seconds: those of another plan. Raises InfeasibleError
    where no pipeline fits.
    """
    return _Search(problem, enough, worth).run(known)


def bound_joint(problem: JointProblem, enough: float) -> float:
    """Return what every pipeline takes at least by the floors of the menu, up to `enough` seconds:
    no pipeline is looked for, and the rows may be any. Where it is below `enough`, it might be
    raised further."""
    return _Search(problem, enough, enough).bound_all(enough)


class _Search:
    def __init__(self, problem: JointProblem, enough: float, worth: float) -> None:
        _check(problem)
        self.problem, self.worth = problem, worth
        self.started = time.monotonic()
        self.links = Links(problem)
        self.sequences = Sequences(problem.menu.class_of_layer)
        kinds = list(dict.fromkeys(self.links.submeshes))
        self.layers = problem.menu.num_layers
        self.space, self.proof_space = self._spaces(kinds)
        smallest = min(kind.num_devices for kind in kinds)
        devices = sum(g.num_hosts * g.devices_per_host for g in problem.device_groups)
        most = min(self.layers, max(1, devices // smallest))
        if problem.num_stages is not None:
            most = problem.num_stages
        self.most = most
        # Of few layers, what the bounds leave open is enumerated.
        self.enough = enough if self.layers > ENUMERATED_LAYERS else math.inf
        self.final = None if problem.num_stages is None else (problem.num_stages,)
        self.bounds = SettingBounds(self.links, self.proof_space, most, self.final)
        self.settings: list[Setting] = []
        self.best: Scored | None = None
        self.binding = False  # whether memory was seen to matter
        self.reach = math.inf  # seconds up to which pipelines are looked at where there is no plan

    def _spaces(self, kinds: list[SubmeshSpec]) -> tuple[Space, Space]:
        """Return the spaces of the guided search and of the bounds."""
        groups, use_all = self.problem.device_groups, self.problem.use_all_devices

        def space(pool: DevicePool | CoarsePool, use_all: bool) -> Space:
            return Space.of(self.sequences, self.layers, pool, use_all)

        states = math.prod(g.num_hosts * g.devices_per_host + 1 for g in groups)
        counted = all(
            nested(group, [k for k in kinds if k.host_group == g]) for g, group in enumerate(groups)
        )
        most = MAX_STATES if len(groups) == 1 else MAX_STATES_OF_GROUPS
        if use_all or not counted or states <= most or self.layers <= ENUMERATED_LAYERS:
            exact = space(DevicePool(groups, kinds), use_all)
            return exact, exact
        coarse, loose = (CoarsePool(groups, kinds, round_up=up, most=most) for up in (True, False))
        return space(coarse, False), space(loose, False)

    @property
    def limit(self) -> float:
        return min(self.best.step_seconds, self.worth) if self.best else math.inf

    def late(self) -> bool:
        """Return whether the deadline has passed."""
        seconds = self.problem.deadline_seconds
        return seconds is not None and time.monotonic() - self.started > seconds

    def bound_all(self, enough: float) -> float:
        """Return a bound of all settings; once one is below `enough`, no other is refined."""
        self._find_settings()
        for setting in self.settings:
            if not self.bounds.refine(setting, enough, enough):
                break
        return min((s.bound for s in self.settings), default=enough)

    def _find_settings(self) -> None:
        """Make the settings of all microbatch counts, those with the least bounds first."""
        shared: AskedFloors = {}
        for count in self.problem.counts or microbatch_counts(self.problem.batch_size):
            costs = CountCosts(MenuTable(self.problem, count, shared), self.space)
            if costs.meshes:
                self.settings += self._settings(costs)
        self.settings.sort(key=lambda s: s.bound)

    def run(self, known: Sequence[Known | JointPlan]) -> JointPlan:
        self._find_settings()
        self._start_from(known)
        means = [self.bounds.mean(s.costs, proof=False) for s in self.settings]
        self.reach = REACH * min(means, default=math.inf)
        for own in self._by_rows():
            if self.best is not None and self.late():
                break
            open_settings = [
                setting
                for setting in own
                if setting.bound < self.limit and self._rows_bound(setting) < self.limit
            ]
            if open_settings:
                self._guide(open_settings)
        self._interleave()
        self._improve()
        if self.problem.proof:
            self._refine_all()
            self._enumerate()
        else:
            self._raise_quickly()
        if self.best is None:
            raise self._infeasible()
        return self._plan(self.best)

    def _start_from(self, known: Sequence[Known | JointPlan]) -> None:
        """Take the known pipelines that fit in hand."""
        settings = {(s.costs.table.num_microbatches, s.rule.name): s for s in self.settings}
        for one in known:
            setting = settings.get((one.num_microbatches, one.schedule))
            if setting is None:
                continue
            if setting.interleaving is not None:
                of = one if isinstance(one, Known) else Known.of(one)
                found = setting.interleaving.chains.of_stages(of.stages, of.num_meshes)
            elif isinstance(one, Known):
                found = fixed_stages(one.stages, setting.costs, setting.rule, self.links)
            else:
                found = with_rows(one, setting.costs, setting.rule, self.links)
            if found is not None and (
                setting.best is None or found.step_seconds < setting.best.step_seconds
            ):
                setting.best = found
                if found.step_seconds < self.limit:
                    self.best = found

    def _settings(self, costs: CountCosts) -> list[Setting]:
        """Return the settings of one microbatch count; of one microbatch all orders are one but
        those of split backwards."""
        result = []
        alike = False
        for name in self.problem.schedules:
            rule = rule_in_slices(SCHEDULE_RULES[name], self.problem.num_slices)
            single = costs.table.num_microbatches == 1 and not rule.splits_backward
            if single and alike:
                continue
            alike |= single
            if rule.interleaves:
                interleaving = Interleaving(costs, self.links)
                result.append(Setting(costs, rule, interleaving.bound(), interleaving))
                continue
            result.append(Setting(costs, rule, self.bounds.mean(costs, proof=True)))
        return result

    def _by_rows(self) -> list[list[Setting]]:
        """Return the settings of each count without interleaving, in the order of what their rows
        take at least."""
        own: dict[CountCosts, list[Setting]] = {}
        for setting in self.settings:
            if setting.interleaving is None:
                own.setdefault(setting.costs, []).append(setting)

        def order(some: list[Setting]) -> tuple[float, float]:
            return min(map(self._rows_bound, some)), self.bounds.mean(some[0].costs, proof=False)

        return sorted(own.values(), key=order)

    def _rows_bound(self, setting: Setting) -> float:
        """Return what a pipeline of the menu's rows takes at least, within memory where that was
        seen to matter; it is no bound of ways that have floors alone."""
        bound = 0.0
        for held in ((), self.bounds.held(setting)):
            if held and (bound >= self.limit or not self.binding or not self.problem.proof):
                break
            limit = min(self.limit, self.reach)
            bound = max(bound, self.bounds.quick(setting, held, False, limit)[0])
        if setting.costs.same_proof:
            setting.bound = max(setting.bound, bound)
        return bound

    def _guide_of(self, costs: CountCosts, rules: tuple[ScheduleRule, ...]) -> Guide:
        least, _, _ = self.links.crossings(costs.table, costs.meshes)
        # With those that cross hosts at the least, pipelines are now better and now worse.
        crossing = self.space.crossing(least, least)
        named = {rule.name: rule for rule in rules}
        rule = next((named[name] for name in GUIDES if name in named), rules[0])
        return Guide(costs, rule, self.links, crossing, self.most, self.final, rules)

    def _guide(self, settings: list[Setting]) -> None:
        """Look for good pipelines of one microbatch count, guided by its first schedule, and where
        memory matters also by one that holds more."""
        costs = settings[0].costs
        guide = self._guide_of(costs, tuple(setting.rule for setting in settings))
        found = guide.run(ROUNDS, self.limit)
        self.binding |= guide.binding
        holds_more = tuple(s.rule for s in settings if s.rule.least_delayed > guide.delayed)
        if guide.binding and holds_more:
            of_more = self._guide_of(costs, holds_more)
            for name, one in of_more.run(ROUNDS, self.limit).items():
                if name not in found or one.step_seconds < found[name].step_seconds:
                    found[name] = one
            guide.first |= of_more.first
        for setting in settings:
            best = found.get(setting.rule.name)
            if best is None:
                continue
            setting.first = guide.first.get(setting.rule.name)
            # With more ways to share out the microbatches in flight.
            setting.best = score([best.stages], best.rule, costs.table, self.links)
            if setting.best is not None and setting.best.step_seconds < self.limit:
                self.best = setting.best

    def _interleave(self) -> None:
        settings = {s.interleaving: s for s in self.settings if s.interleaving is not None}
        found = best_interleaved(list(settings), self.limit)
        if found is not None and found.step_seconds < self.limit:
            own = next(
                s
                for s in settings.values()
                if s.costs.table.num_microbatches == found.num_microbatches
            )
            own.best = self.best = found

    def _improve(self) -> None:
        """Make plans better by small changes: of each setting its own best and the best of all."""
        work = Work(STAGES_SOLVED[self.layers > FEW_LAYERS])
        rows: dict[CountCosts, Rows] = {}
        settings = [s for s in self.settings if s.interleaving is None]
        settings.sort(key=lambda s: s.best.step_seconds if s.best else s.bound + self.limit)
        for setting in settings[:IMPROVED]:
            starts = [setting.best, setting.first, self.best]
            for start in dict.fromkeys(starts):
                if start is None or start.num_meshes is not None or self.late():
                    continue
                if start.step_seconds > IMPROVABLE * self.worth:
                    continue
                if setting.bound >= self.limit:
                    break
                own = rows.setdefault(setting.costs, Rows(setting.costs, self.links, work))
                found = Improvement(own, setting.rule).run(start)
                if found is None:
                    continue
                if setting.best is None or found.step_seconds < setting.best.step_seconds:
                    setting.best = found
                if found.step_seconds < self.limit:
                    self.best = found
        most = IMPROVABLE * self.worth
        leaders = [s for s in settings if s.best is not None and s.best.step_seconds <= most]
        leaders.sort(key=lambda s: s.best.step_seconds if s.best else math.inf)
        for setting in leaders[:POLISHED]:
            assert setting.best is not None
            fresh = Rows(setting.costs, self.links, Work(POLISHED_STAGES))
            setting.best = Improvement(fresh, setting.rule).polish(setting.best)
            if setting.best.step_seconds < self.limit:
                self.best = setting.best

    def _raise_quickly(self) -> None:
        """Raise the bounds of settings that may have a better plan, without floors or memory."""
        for setting in self.settings:
            if setting.interleaving is None and setting.bound < self.limit:
                quick, _ = self.bounds.quick(setting, (), True, self.limit)
                setting.bound = max(setting.bound, quick)

    def _refine_all(self) -> None:
        """Raise the least bound, a little above the next one at a time, until it reaches the best
        plan or one that cannot be raised: no setting is refined beyond what that takes."""
        waiting = [(s.bound, n, s) for n, s in enumerate(self.settings)]
        heapq.heapify(waiting)
        lowest = min(self.limit, self.enough)
        while waiting and waiting[0][0] < lowest and not self.late():
            bound, n, setting = heapq.heappop(waiting)
            following = waiting[0][0] if waiting else math.inf
            step = (1 + RAISED) * max(bound, following)
            target = min(lowest, max(step, RAISED * lowest))  # from nothing too
            if not self.bounds.refine(setting, target, lowest):
                lowest = min(lowest, setting.bound)
                continue
            heapq.heappush(waiting, (max(setting.bound, target), n, setting))

    def _enumerate(self) -> None:
        if self.layers > ENUMERATED_LAYERS:
            return
        pool = self.space.pool
        assert isinstance(pool, DevicePool)
        budget = Budget(STAGES_TRIED)
        fronts: dict[int, Fronts] = {}
        for setting in sorted(self.settings, key=lambda s: s.bound):
            if setting.bound >= self.limit or setting.interleaving is not None or self.late():
                continue
            table = setting.costs.table
            count = table.num_microbatches
            if count not in fronts:
                fronts[count] = Fronts(table, self.sequences, LABELS)
            found, complete = Enumeration(
                table, setting.rule, fronts[count], pool, self.links, budget, self.limit
            ).run()
            setting.done = complete and setting.costs.same_proof
            if found is not None:
                setting.best = self.best = found

    def _infeasible(self) -> InfeasibleError:
        counts = sorted({s.costs.table.num_microbatches for s in self.settings})
        if all(SCHEDULE_RULES[name].interleaves for name in self.problem.schedules):
            stages = self.problem.num_stages or "a multiple of the meshes as number of"
            return InfeasibleError(
                f"no interleaved pipeline of {self.layers} layers with {counts} microbatches fits: "
                "it takes at least two equal submeshes with two or more stages each, and "
                f"{stages} stages; name another schedule"
            )
        if not any(self.bounds.covers(s) for s in self.settings):
            wanted = self.problem.num_stages
            stages, fewer = (f" as {wanted} stages", "fewer stages, ") if wanted else ("", "")
            return InfeasibleError(
                f"no chain of the menu's meshes covers all {self.layers} layers{stages} on the "
                f"devices with {counts} microbatches; ask for {fewer}smaller meshes, rows whose "
                "batch_split divides the samples of a microbatch, or idle devices"
            )
        remedy = "rows that keep less (recomputation, sharded state) or more devices"
        return InfeasibleError(
            f"no pipeline fits in memory with {counts} microbatches under "
            f"{self.problem.schedules}; add {remedy}",
            remedy=remedy,
        )

    def _plan(self, best: Scored) -> JointPlan:
        if best.num_meshes is None:
            best = score([best.stages], best.rule, self._table(best), self.links) or best
        lower = best.step_seconds
        for setting in self.settings:
            bound = best.step_seconds if setting.done else setting.bound
            if setting.best is not None:
                what = f"a pipeline of {setting.best.num_microbatches} microbatches under "
                what += repr(setting.rule.name)
                check_bound(setting.bound, setting.best.step_seconds, what)
            lower = min(lower, bound)
        plan = plan_of(best, self.problem, self.links, lower, self._tried())
        work = (self.bounds.work(costs, lower) for costs in {s.costs for s in self.settings})
        return evolve(plan, complete=not self.late(), work_bound=min(work))

    def _table(self, best: Scored) -> MenuTable:
        return next(
            s.costs.table
            for s in self.settings
            if s.costs.table.num_microbatches == best.num_microbatches
        )

    def _tried(self) -> tuple[TriedCount, ...]:
        return tuple(
            TriedCount(
                num_microbatches=s.costs.table.num_microbatches,
                schedule=s.rule.name,
                step_seconds=s.best.step_seconds if s.best else None,
                lower_bound=s.bound,
                stages=tuple((c.layer_start, c.layer_stop, c.mesh) for c in s.best.stages)
                if s.best
                else (),
                num_meshes=s.best.num_meshes if s.best else None,
            )
            for s in self.settings
        )


def _check(problem: JointProblem) -> None:
    unknown = [name for name in problem.schedules if name not in SEARCHED]
    if unknown or not problem.schedules:
        raise ValueError(
            f"JointProblem.schedules must be some of {SEARCHED}, got {problem.schedules}"
        )
    if problem.num_stages is not None and not 1 <= problem.num_stages <= problem.menu.num_layers:
        raise ValueError(
            "JointProblem.num_stages must be between 1 and the number of layers, "
            f"{problem.menu.num_layers}, got {problem.num_stages}"
        )
