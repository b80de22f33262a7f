"""The chosen stages, solved exactly (`solved_stages`), put together as a plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    KeptMenu,
    ParallelPlan,
    StageCandidate,
    StagePlan,
    load,
)
from alpa_interchange.amounts import format_seconds
from alpa_meta.execution.tasks import Tasks, build_tasks
from alpa_meta.inter_op.candidates import MeshSolution, Outlook
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.meshes import host_of
from alpa_meta.inter_op.scan_stages import staged_program
from alpa_meta.inter_op.split_backward import with_split_backward
from alpa_meta.inter_op.staging import Staging, assign_stages
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.planning.counted_passes import counted_passes
from alpa_meta.planning.plan_summary import layer_summaries, program_summary, provenance
from alpa_meta.planning.solved_stages import (
    MENU_ERROR,
    Choose,
    Lacking,
    SolvedStage,
    StageSolving,
)
from alpa_meta.step.program import Program, Step
from alpa_meta.token_slices.budget import check_budget
from cost_model import CostModel

# As `MENU_ERROR`, where launches of kernels are most of a step, as in toys: RWKV of width 8 in 3
# stages on 4 L4 takes 1.5 % less than its bound, as 24 of its kernels of 6 us are fused at its size
# alone. Several times what was seen: no theory says how much it can be.
LAUNCH_ERROR = 0.1


@frozen(eq=False)
class Planned:
    """A plan together with the program it is for, ready to be compiled.

    `cached`: it was found by an earlier search, of this or another process. `menu`: what it was
    chosen from, or the file that holds it; None for plans that were not searched for or that no
    menu was made for.
    """

    plan: ParallelPlan
    program: Program
    staging: Staging
    selections: tuple[Selection, ...]
    tasks: Tasks
    cached: bool = False
    menu: KeptMenu | Path | None = None

    def kept_menu(self) -> KeptMenu | None:
        """Return the menu, read where it is in a file."""
        return load(self.menu, KeptMenu) if isinstance(self.menu, Path) else self.menu


def finish(
    stage_plan: StagePlan,
    outlook: Outlook,
    layering: Layering,
    bound: float,
    step: Step,
    model: CostModel,
    options: Options,
    choose: Choose,
    weigh: bool = False,
) -> Planned | Lacking:
    """Return the plan with every stage solved exactly, or the bytes missing if one does not fit.

    `choose` answers each stage's selection problem under a memory limit in bytes (`Choose`). With
    `weigh`, stages that take longer than `stage_plan` says are solved for the step too
    (`counted_passes`).
    Raises stage_dp.BoundError if the plan is faster than `bound`, which holds for all plans.
    """
    cluster = model.cluster
    cuts = [stage.candidate.layer_start for stage in stage_plan.stages[1:]]
    if outlook.program.slices is not None:
        hosts = [
            {host_of(cluster, device)[0] for device in stage.device_ids}
            for stage in stage_plan.stages
        ]
        check_budget(hosts, stage_plan.schedule, outlook.program.slices.count)
    if not cuts and outlook.uncut is not None:
        outlook, layering = outlook.uncut
        stage_plan = _over_all_layers(stage_plan, outlook.num_layers)
    program, staging = chosen_stages(outlook, layering, cuts, stage_plan)
    solving = StageSolving(program, staging, stage_plan, outlook.num_layers, model, options, choose)
    solved = solving.run()
    if isinstance(solved, Lacking):
        return solved
    seconds = _step_seconds(stage_plan, solved)
    if weigh and seconds > stage_plan.step_seconds * (1 + MENU_ERROR):
        weighed = solving.run(counted_passes(stage_plan))
        if not isinstance(weighed, Lacking):
            least = _step_seconds(stage_plan, weighed)
            if least < seconds:
                solved, seconds = weighed, least
    stages = [one.placed for one in solved]
    bound = _bound_below(bound, seconds)
    exact = stage_dp.with_device_bytes(
        evolve(
            stage_plan,
            stages=tuple(stages),
            step_seconds=seconds,
            lower_bound=bound,
            peak_bytes=tuple([one.sharding.peak_bytes for one in solved]),
        )
    )
    tasks = build_tasks(program, staging)
    plan = ParallelPlan(
        program=program_summary(program, step),
        cluster=cluster,
        layers=layer_summaries(outlook, layering),
        stage_plan=exact,
        shardings=tuple([one.sharding for one in solved]),
        tasks=tasks.graph,
        step_seconds=seconds,
        lower_bound=bound,
        provenance=provenance(),
    )
    return Planned(plan, program, staging, tuple([one.selection for one in solved]), tasks)


def _step_seconds(stage_plan: StagePlan, solved: Sequence[SolvedStage]) -> float:
    """Return what a step takes with the stages of a plan solved."""
    return stage_dp.step_seconds(
        [one.placed.candidate for one in solved],
        stage_plan.schedule,
        stage_plan.in_flight,
        num_meshes=stage_plan.num_meshes,
    )


def _bound_below(bound: float, seconds: float) -> float:
    """Return the bound that holds beside a plan of so many seconds: none (0, with a warning) where
    the menu's prices are off by more than what is told apart; BoundError where that is no excuse.
    """
    if seconds >= bound * (1 - MENU_ERROR):
        return min(bound, seconds)  # they may be equal but for that error
    stage_dp.check_bound(bound * (1 - LAUNCH_ERROR), seconds, "the plan with its stages solved")
    warnings.warn(
        f"the plan takes {format_seconds(seconds)} a step, less than the {format_seconds(bound)} "
        "of its bound: at its microbatch size other kernels are fused than where layers were "
        "priced. The plan is right, but how far it is from the best one is not known",
        UserWarning,
        stacklevel=2,
    )
    return 0.0


def chosen_stages(
    outlook: Outlook, layering: Layering, cuts: Sequence[int], stage_plan: StagePlan
) -> tuple[Program, Staging]:
    """Return the program that runs when the layers are cut into stages at `cuts`, and its staging
    for the schedule and meshes of `stage_plan`."""
    if not cuts and outlook.cut is None:
        return outlook.program, outlook.staging
    if outlook.cut is not None:
        program, staging = staged_program(outlook.cut, layering, cuts)
    else:
        program = outlook.program
        staging = assign_stages(layering, cuts, program.jaxpr.outvars)
    rule = stage_dp.SCHEDULE_RULES[stage_plan.schedule]
    if rule.splits_backward:
        staging = with_split_backward(staging)
    if rule.interleaves:
        staging = evolve(staging, num_meshes=stage_plan.num_meshes)
    return program, staging


def _over_all_layers(plan: StagePlan, num_layers: int) -> StagePlan:
    """Return a plan of one stage over another number of layers."""
    (stage,) = plan.stages
    candidate = evolve(stage.candidate, layer_start=0, layer_stop=num_layers)
    return evolve(plan, stages=(evolve(stage, candidate=candidate),))


def whole_solution(
    candidate: StageCandidate, solutions: Sequence[MeshSolution]
) -> MeshSolution | None:
    """Return the solution of the whole program on the whole cluster that `candidate` stands
    for."""
    return next(
        (
            found
            for found in solutions
            if found.whole and (found.submesh, found.mesh) == (candidate.submesh, candidate.logical)
        ),
        None,
    )
