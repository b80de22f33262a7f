"""The joint search over a step's layer menu.

menu      what each kind of layer costs on each mesh               -> inter_op.layer_menu
search    stage_dp.solve_joint, with boundaries on the links that they cross
plan      the stages it chose, which `chosen_plan.finish` solves exactly
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    LogicalMesh,
    PlacedStage,
    StageCandidate,
    StagePlan,
    SubmeshSpec,
)
from alpa_interchange.menu import (
    RECOMPUTATIONS,
    JointPlan,
    JointProblem,
    LayerMenu,
)
from alpa_meta.inter_op.candidates import Outlook
from alpa_meta.inter_op.floor_menu import floor_menu
from alpa_meta.inter_op.layer_menu import MenuBuilder, menu_of, menu_sizes
from alpa_meta.inter_op.meshes import device_groups, usable_memory
from alpa_meta.inter_op.row_lines import Sized
from alpa_meta.inter_op.short_step import ShortStep
from alpa_meta.inter_op.window import UnlikeCopiesError
from alpa_meta.intra_op.other_sizes import same_equations
from alpa_meta.operators.regions import is_scan
from alpa_meta.options import Options
from alpa_meta.planning.menu_problem import Crossing, boundary_floor_of, boundary_of
from alpa_meta.planning.microbatch_counts import refusal
from alpa_meta.planning.outlooks import by_short_step, outlook_in_pieces, outlook_of
from alpa_meta.planning.sliced_menu import in_slices, of_microbatches
from alpa_meta.step.program import Program, Step
from cost_model import CostModel

# Share of the memory by which rows may say that one stage does not fit which does: they add up what
# layers hold at their own worst moments. Some 3 % was seen (8 layers of 2048 hold 377 MB, and fit
# by the menu from 390 MB on); every try costs a solution of the whole step, 1 CPU s of LLaMA-8B.
ROWS_HOLD_MORE = 0.1
# Of the memory, that one stage may hold more than there is by its rows: solved exactly it may fit.
# GPT-1.3B on 4 V100 takes 43.26 s a step so, not 43.57, and 24 layers of GPT-2.6B on 8 29.77, not
# 29.97, for 1 to 2 of some 10 CPU s; 8 % gives the same. Pipelines have not enough of it: GPT-15B
# on 32 V100 took 55.85 s, not 56.31, in 50 instead of 33 CPU s, GPT-6.7B on 16 the same step time
# in 32 instead of 18.
ROOM = 0.04
# Equations of a window from which on pipelines are bounded before rows are made. On 16 H100 the
# U-Net of Stable Diffusion (27,135) is planned in 97 instead of 144 CPU s so, 16 Evoformer blocks
# (9,464) in 63 instead of 159; an MLP-Mixer of 32 blocks has 1,984, transformers fewer. Where the
# bound is too low the problems of all meshes are built twice.
LARGE_WINDOW = 2000


@frozen(eq=False)
class MenuSearch:
    """A menu with what was chosen from it."""

    builder: MenuBuilder
    menu: LayerMenu
    crossing: Crossing
    problem: JointProblem
    plan: JointPlan
    options: Options
    num_slices: int = 1  # of each microbatch: the plan's microbatches are slices

    @property
    def bound(self) -> float:
        """Return what every plan takes at least. Slices are not as long as one another, and run in
        other orders than those searched: only their work is known."""
        return self.plan.lower_bound if self.num_slices == 1 else self.plan.work_bound

    def recomputation(self) -> tuple[str, ...]:
        """Return what each layer computes again."""
        found = []
        for stage in self.plan.stages:
            rows = self.menu.meshes[stage.mesh].rows
            for layer, row in zip(
                range(stage.layer_start, stage.layer_stop), stage.rows, strict=True
            ):
                found.append(rows[self.menu.class_of_layer[layer]][row].recomputation)
        return tuple(found)

    def nearly_fitting(self) -> tuple[int, ...]:
        """Return as many microbatches as the plan's, if it recomputes, and the next fewer, where
        one stage that recomputes nothing is at most `ROWS_HOLD_MORE` short of memory."""
        own = self.plan.num_microbatches
        fewer = [count for count in self.problem.counts or () if count < own][-1:]
        recomputes = set(self.recomputation()) != {"none"}
        return tuple(n for n in (*fewer, *([own] if recomputes else [])) if self._nearly_fits(n))

    def _nearly_fits(self, count: int) -> bool:
        samples = self.problem.batch_size // count
        groups = self.problem.device_groups
        devices = sum(group.num_hosts * group.devices_per_host for group in groups)
        for mesh in self.menu.meshes:
            if mesh.submesh.num_devices < devices:
                continue
            held, working = 0.0, 0.0
            for number in self.menu.class_of_layer:
                rows = [row for row in mesh.rows[number] if row.recomputation == "none"]
                held += min(
                    (row.state_bytes + row.activation_bytes.value(samples) for row in rows),
                    default=math.inf,
                )
                working = max(
                    working, min((row.transient_bytes.value(samples) for row in rows), default=0.0)
                )
            if held + working <= groups[mesh.submesh.host_group].memory * (1 + ROWS_HOLD_MORE):
                return True
        return False

    def within_less(self, bytes: float) -> MenuSearch:
        """Return the search where devices have `bytes` less; stage_dp.InfeasibleError if none
        fits."""
        groups = tuple(
            evolve(group, memory=max(group.memory - 1.02 * bytes, 1.0))
            for group in self.problem.device_groups
        )
        problem = evolve(self.problem, device_groups=groups)
        return self._with(problem, stage_dp.solve_joint(problem, self.plan))

    def searched_on(self) -> MenuSearch:
        """Return the search of the best plan, however long it takes."""
        return self._with(self.problem, stage_dp.solve_joint(self.problem, self.plan))

    def not_interleaved(self) -> MenuSearch | None:
        """Return the search under schedules that run one stage on each mesh, None where its plan
        does or no other schedules may be; stage_dp.InfeasibleError if none fits."""
        rules = stage_dp.SCHEDULE_RULES
        left = tuple(one for one in self.problem.schedules if not rules[one].interleaves)
        if not rules[self.plan.schedule].interleaves or not left:
            return None
        problem = evolve(self.problem, schedules=left)
        return self._with(problem, stage_dp.solve_joint(problem))

    def within_more(self) -> MenuSearch | None:
        """Return the search of plans like its own, of one stage, where devices have `ROOM` more
        memory; None where the plan leaves as much and recomputes nothing, or is a pipeline."""
        plan, groups = self.plan, self.problem.device_groups
        if len(plan.stages) > 1:
            return None
        (held,), (stage,) = stage_dp.device_bytes(plan), plan.stages
        memory = groups[self.menu.meshes[stage.mesh].submesh.host_group].memory
        if held * (1 + ROOM) <= memory and set(self.recomputation()) == {"none"}:
            return None
        own = plan.num_microbatches
        near = evolve(
            self.problem,
            device_groups=tuple(evolve(one, memory=one.memory * (1 + ROOM)) for one in groups),
            counts=tuple(n for n in self.problem.counts or () if own <= 2 * n and n <= 2 * own),
            num_stages=1,
            schedules=(plan.schedule,),
            proof=False,
        )
        return self._with(near, stage_dp.solve_joint(near, plan))

    def _with(self, problem: JointProblem, plan: JointPlan) -> MenuSearch:
        """Return the search with another plan; what holds with the memory that there is stays the
        bound."""
        bound, work = self.plan.lower_bound, self.plan.work_bound
        bounded = evolve(plan, lower_bound=bound, work_bound=work)
        return evolve(self, problem=problem, plan=bounded)

    def stage_plan(self) -> StagePlan:
        """Return the chosen pipeline as stages with their predicted costs."""
        plan = self.plan
        stages = []
        interleaves = stage_dp.SCHEDULE_RULES[plan.schedule].interleaves
        for stage, peak, alive in zip(plan.stages, plan.peak_bytes, plan.in_flight, strict=True):
            own = interleaves or self.num_slices > 1
            activation = stage.activation_bytes if own else 0.0
            menu = self.menu.meshes[stage.mesh]
            candidate = StageCandidate(
                layer_start=stage.layer_start,
                layer_stop=stage.layer_stop,
                submesh=menu.submesh,
                logical=menu.logical,
                num_microbatches=plan.num_microbatches,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                backward_weight_seconds=stage.weight_seconds,
                step_seconds=stage.step_seconds,
                boundary_seconds=stage.boundary_seconds,
                state_bytes=peak - stage.transient_bytes - alive * activation,
                activation_bytes=activation,
                transient_bytes=stage.transient_bytes,
            )
            stages.append(PlacedStage(candidate=candidate, device_ids=stage.device_ids))
        # One stage takes as long under every schedule, and holds least under the plain one.
        plain = len(stages) == 1 and "1f1b" in self.problem.schedules
        found = StagePlan(
            stages=tuple(stages),
            num_microbatches=plan.num_microbatches,
            schedule="1f1b" if plain else plan.schedule,
            step_seconds=plan.step_seconds,
            lower_bound=plan.lower_bound,
            peak_bytes=plan.peak_bytes,
            in_flight=(1,) if plain else plan.in_flight,
        )
        if self.num_slices > 1:
            groups = self.problem.device_groups
            memory = [groups[s.candidate.submesh.host_group].memory for s in stages]
            return of_microbatches(
                found, self.num_slices, self.options, memory, self._split_seconds()
            )
        return found

    def _split_seconds(self) -> list[float]:
        """Return what a slice takes more on each stage where the backward pass is in two parts."""
        menu, plan = self.problem.menu, self.plan
        samples = self.problem.batch_size // plan.num_microbatches
        found = []
        for stage in plan.stages:
            rows = menu.meshes[stage.mesh].rows
            of = menu.class_of_layer[stage.layer_start : stage.layer_stop]
            chosen = (rows[number][row] for number, row in zip(of, stage.rows, strict=True))
            found.append(sum(row.split_seconds.value(samples) for row in chosen))
        return found


def search_menu(
    step: Step,
    sized: Mapping[str, Sequence[Sized]],
    meshes: Sequence[tuple[SubmeshSpec, LogicalMesh]],
    model: CostModel,
    options: Options,
    counts: Sequence[int] | None,
    enough: float = math.inf,
    worth: float = math.inf,
) -> MenuSearch | None:
    """Return the best pipeline for `step` by its menu, or any where none takes less than `worth`
    seconds, with a bound that is not raised above `enough`; None where no mesh can be used.

    Raises stage_dp.InfeasibleError where no pipeline fits the memory.
    """
    cluster = model.cluster
    builder = MenuBuilder(sized, model, options, step.batch_size or 1)
    memory = [
        usable_memory(cluster, number, options.memory) for number in range(len(cluster.host_groups))
    ]
    menu = menu_of(builder, meshes, memory)
    if menu is None:
        return None
    crossing = tuple(
        tuple(builder.crossing[mesh.submesh, mesh.logical, k] for k in range(len(mesh.layouts)))
        for mesh in menu.meshes
    )
    problem = _joint_problem(step, builder, menu, crossing, counts)
    slices = sized["none"][-1].outlook.program.slices
    num_slices = 1 if slices is None else slices.count
    if num_slices > 1:
        problem = in_slices(problem, num_slices)
    plan = stage_dp.solve_joint(problem, enough=enough, worth=worth)
    builder.forget_seconds()  # 29 MB of GPT-39B on 64 V100, while the plan is finished
    return MenuSearch(builder, menu, crossing, problem, plan, options, num_slices)


def _joint_problem(
    step: Step,
    builder: MenuBuilder,
    menu: LayerMenu,
    crossing: Crossing,
    counts: Sequence[int] | None,
) -> JointProblem:
    """Return the problem of choosing from a menu that `builder` filled."""
    options, model, batch = builder.options, builder.model, builder.batch
    if counts is None:  # larger microbatches than any the menu was made from have no bound
        largest = builder.sizes["none"][-1].samples
        counts = [count for count in step.microbatch_counts if batch // count <= largest]
    return JointProblem(
        menu=menu,
        batch_size=batch,
        device_groups=device_groups(model.cluster, options.memory),
        boundary=boundary_of(menu, crossing, model),
        boundary_floor=boundary_floor_of(menu, crossing, model),
        counts=tuple(counts),
        schedules=options.schedules,
        num_stages=options.num_stages,
        floors_at=builder.floors_at,
    )


def bound_by_floors(
    step: Step,
    sized: Mapping[str, Sequence[Sized]],
    meshes: Sequence[tuple[SubmeshSpec, LogicalMesh]],
    model: CostModel,
    options: Options,
    counts: Sequence[int] | None,
    enough: float,
) -> float:
    """Return what pipelines take at least, by floors alone, up to `enough` seconds; 0 for steps
    whose window has few equations, or in token slices: their menus are made anyway."""
    main = sized["none"][-1].outlook
    if len(main.window.staging.eqns) < LARGE_WINDOW or main.program.slices is not None:
        return 0.0
    builder = MenuBuilder(sized, model, options, step.batch_size or 1)
    found = floor_menu(builder, meshes)
    if found is None:
        return 0.0
    menu, crossing = found
    problem = _joint_problem(step, builder, menu, crossing, counts)
    return stage_dp.bound_joint(problem, enough)


def sized_programs(
    step: Step, cluster: ClusterSpec, options: Options
) -> dict[str, list[Sized]] | None:
    """Return the program at the sizes of its menu, by kind of recomputation."""
    batch = step.batch_size or 1
    possible = [batch // count for count in reversed(step.microbatch_counts)]
    if options.num_microbatches:
        sizes: tuple[int, ...] = (batch // options.num_microbatches,)
    else:
        sizes = menu_sizes(possible, cluster.num_devices)
    look = functools.partial(
        _sized, possible=possible, sizes=sizes, cluster=cluster, options=options
    )
    return by_short_step(step, options, cluster, look)


def _sized(
    step: Step | ShortStep,
    possible: Sequence[int],
    sizes: Sequence[int],
    cluster: ClusterSpec,
    options: Options,
) -> dict[str, list[Sized]] | None:
    """Return the program at these of the `possible` sizes, as far as the batch can be cut so and
    all have the equations of the largest.

    Raises UnlikeCopiesError where a short step cannot stand for the whole one.
    """
    sized: dict[str, list[Sized]] = {}
    largest: Program | None = None
    like: Program | None = None
    for wanted in reversed(sizes):
        # The program of one example may lack equations of all others: the next two may do.
        for size in [one for one in possible if one >= wanted][:3]:
            count = possible[-1] // size
            if options.num_microbatches is None and refusal(step, count, options):
                break
            program = step.program(count)
            if program.left_out and program.inexact:
                raise UnlikeCopiesError  # the mean of its microbatches is traced anew
            largest = largest or program
            traced_anew = program.averaged or largest.averaged
            if traced_anew and not same_equations(program.jaxpr.eqns, largest.jaxpr.eqns):
                continue
            found = {}
            for kind in _kinds(program, options):
                chosen = options if options.recompute else evolve(options, recompute=kind)
                outlook, _ = outlook_in_pieces(program, chosen, cluster, like=like) or outlook_of(
                    program, chosen, cluster, like=like
                )
                like = like or outlook.program
                if _alike(outlook, sized[kind][0].outlook if kind in sized else outlook):
                    found[kind] = Sized(size, kind, outlook)
            if found:
                for kind, one in found.items():
                    sized.setdefault(kind, []).insert(0, one)
                break
    return sized or None


def _alike(outlook: Outlook, other: Outlook) -> bool:
    """Return whether two sizes of a program have the same layers and equations; UnlikeCopiesError
    where a short program cannot tell."""
    mine, its = outlook.window, other.window
    return mine.classes == its.classes and same_equations(mine.staging.eqns, its.staging.eqns)


def _kinds(program: Program, options: Options) -> tuple[str, ...]:
    """Return the kinds of recomputation that need programs of their own: where layers lie inside a
    scan. Of others the menu derives what they cost.
    """
    free = options.recompute is None
    return RECOMPUTATIONS if free and any(map(is_scan, program.jaxpr.eqns)) else ("none",)
