"""The chosen stages solved exactly, each under its memory limit, and put together as a plan."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    KeptMenu,
    ParallelPlan,
    PlacedStage,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    StageSharding,
    load,
)
from alpa_interchange.amounts import format_seconds
from alpa_meta.execution.tasks import Tasks, build_tasks
from alpa_meta.inter_op.candidates import (
    MeshSolution,
    Outlook,
    exact_candidate,
    input_pins,
    totals_share,
)
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.meshes import host_of, usable_memory
from alpa_meta.inter_op.scan_stages import staged_program
from alpa_meta.inter_op.split_backward import with_split_backward
from alpa_meta.inter_op.stage_selection import StageScope, stage_scope
from alpa_meta.inter_op.staging import Staging, assign_stages
from alpa_meta.intra_op.equal_stages import Stages
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.planning.counted_passes import solved_for
from alpa_meta.planning.operator_names import StageNames
from alpa_meta.planning.plan_identity import problem_hash
from alpa_meta.planning.plan_summary import (
    layer_summaries,
    program_summary,
    provenance,
    stage_sharding,
)
from alpa_meta.step.program import Program, Step
from alpa_meta.token_slices.budget import check_budget
from alpa_meta.token_slices.places import Slices
from alpa_meta.token_slices.staged import slice_numbers
from cost_model import CostModel

# Share of a step by which stages may undercut the bound of their menu. Its rows are built at one
# microbatch size and priced at the others, though what XLA is taken to fuse is decided at the
# former: MoE-380M of 4 layers on one V100, in microbatches of 16, takes 2.5e-4 less than rows built
# at 1 say, and as much as rows built at 16. And numbers that only the update computes, such as the
# mean of the losses, have a layer of their own in the menu: 2e-6 of a step of 0.1 ms.
MENU_ERROR = 1e-3
# The same where launches of kernels are most of a step, as in toys: RWKV of width 8 in three stages
# on 4 L4 takes 1.5 % less than its bound, as 24 of its kernels of 6 us are fused at its size alone.
# Several times what was seen: no theory says how much it can be.
LAUNCH_ERROR = 0.1

Choose = Callable[[StageCandidate, Selection, float], ShardingSolution]
"""From a stage's candidate, its selection problem and a limit in bytes to a choice of
strategies."""


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


@frozen
class Lacking:
    """The bytes that a stage lacks of its limit, and how many more its devices need than the rows
    of their stages say."""

    bytes: float
    unpredicted: float


def stage_selection(
    program: Program,
    staging: Staging,
    stage: int,
    stage_plan: StagePlan,
    model: CostModel,
    options: Options,
    built: Stages,
) -> tuple[StageScope, Selection]:
    """Return the scope of a stage and its selection problem, that of an equal one `built`
    before."""
    candidate, in_flight = stage_plan.stages[stage].candidate, stage_plan.in_flight[stage]
    early = stage_dp.SCHEDULE_RULES[stage_plan.schedule].receives_early
    pins = input_pins(program, candidate.logical, options)
    num_delayed = 0
    if staging.by_weight is not None:
        num_delayed = in_flight - min(program.num_microbatches, staging.num_stages - stage)
    slices = slice_numbers(program, staging) if staging.num_stages > 1 else ()
    scope = stage_scope(
        program,
        staging,
        stage,
        in_flight,
        pins,
        num_delayed=num_delayed,
        slices=slices,
        early=stage_plan.in_flight if early else (),
    )
    costs = built.costs(candidate.logical, model, candidate.submesh.host_group)
    return scope, built.build(scope.eqns, costs, f"stage {stage}")


def finish(
    stage_plan: StagePlan,
    outlook: Outlook,
    layering: Layering,
    bound: float,
    step: Step,
    model: CostModel,
    options: Options,
    choose: Choose,
    passes: Sequence[int] = (),
) -> Planned | Lacking:
    """Return the plan with every stage solved exactly, or the bytes missing if one does not fit.

    `choose` answers each stage's selection problem under a memory limit in bytes (`Choose`);
    `passes` says how often the passes of each stage count there (`counted_passes`).
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
    names = StageNames(staging, program.jaxpr.constvars)
    selections, shardings = [], []
    stages: list[PlacedStage] = []
    peaks: list[float] = []
    solved: dict[str, tuple[ShardingSolution, int]] = {}  # with the microbatches in flight
    built = Stages()
    for stage, placed in enumerate(stage_plan.stages):
        options.progress("stages", stage, len(stage_plan.stages))
        in_flight = stage_plan.in_flight[stage]
        scope, selection = stage_selection(
            program, staging, stage, stage_plan, model, options, built
        )
        memory_limit = usable_memory(cluster, placed.candidate.submesh.host_group, options.memory)
        limit = _limit(stage_plan, stage, memory_limit, stages, peaks)
        counted = passes[stage] if passes else None
        key = problem_hash(selection) + repr((selection.problem.node_cost.sum(), limit, counted))
        finished = functools.partial(
            finished_stage,
            program,
            staging,
            stage,
            placed,
            (scope, selection),
            num_layers=outlook.num_layers,
            names=names,
            executor=options.executor,
        )
        solution, of_more = solved.get(key, (None, 0))
        found = None
        if solution is not None and still_fits(selection, solution, limit):
            found = finished(solution)
        if found is None or (in_flight < of_more and _slower(found[0], placed)):
            chosen = functools.partial(choose, placed.candidate)
            if counted is None:
                solution = chosen(selection, limit)
            else:
                solution = solved_for(selection, counted, limit, chosen)
            if solution.choice is None:
                lacking = max((solution.smallest_memory or limit * 1.1) - limit, 1.0)
                told = min(stage_plan.device_bytes[stage], memory_limit)
                return Lacking(lacking, memory_limit + lacking - told)
            solved[key] = solution, in_flight
            found = finished(solution)
        made, sharding = found
        selections.append(selection)
        shardings.append(sharding)
        stages.append(made)
        peaks.append(sharding.peak_bytes)
    options.progress("stages", len(stages), len(stages))
    chain = [stage.candidate for stage in stages]
    seconds = stage_dp.step_seconds(
        chain, stage_plan.schedule, stage_plan.in_flight, num_meshes=stage_plan.num_meshes
    )
    bound = _bound_below(bound, seconds)
    exact = evolve(
        stage_plan,
        stages=tuple(stages),
        step_seconds=seconds,
        lower_bound=bound,
        peak_bytes=tuple(peaks),
    )
    rows = stage_plan.device_bytes  # () of random plans, which keep to no limit
    for placed, needed, predicted in zip(stages, exact.device_bytes, rows, strict=False):
        memory_limit = usable_memory(cluster, placed.candidate.submesh.host_group, options.memory)
        # Stages of one mesh were solved each with other transients than the next ones have.
        several = sum(one.device_ids == placed.device_ids for one in stages) > 1
        if several and needed > memory_limit * (1 + 1e-9):
            return Lacking(needed - memory_limit, needed - min(predicted, memory_limit))
    tasks = build_tasks(program, staging)
    plan = ParallelPlan(
        program=program_summary(program, step),
        cluster=cluster,
        layers=layer_summaries(outlook, layering),
        stage_plan=exact,
        shardings=tuple(shardings),
        tasks=tasks.graph,
        step_seconds=seconds,
        lower_bound=bound,
        provenance=provenance(),
    )
    return Planned(plan, program, staging, tuple(selections), tasks)


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


def finished_stage(
    program: Program,
    staging: Staging,
    stage: int,
    placed: PlacedStage,
    selected: tuple[StageScope, Selection],
    solution: ShardingSolution,
    num_layers: int,
    names: StageNames,
    executor: str,
) -> tuple[PlacedStage, StageSharding]:
    """Return what a plan says of a stage that runs by `solution`: its figures, and its sharding."""
    scope, selection = selected
    sliced = _sliced(program, staging)
    numbers = slice_numbers(program, staging)
    of_stage = [numbers[k] for k in scope.members]
    candidate, costs = exact_candidate(
        scope,
        selection,
        solution,
        placed.candidate,
        num_layers,
        totals_share(program),
        None if sliced is None else (sliced, of_stage),
    )
    memory = costs.peak.by_kind()
    sharding = stage_sharding(program, placed, selection, solution, memory, executor, names, stage)
    return PlacedStage(candidate=candidate, device_ids=placed.device_ids), sharding


def _sliced(program: Program, staging: Staging) -> Slices | None:
    """Return the token slices that stages run one by one; one stage runs all as one program."""
    return program.slices if staging.num_stages > 1 else None


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


def still_fits(selection: Selection, solution: ShardingSolution, limit: float) -> bool:
    """Return whether the solution of an equal stage does for one that may hold more
    microbatches."""
    return solution.choice is not None and selection.memory.peak(solution.choice).total <= limit


def _slower(made: PlacedStage, placed: PlacedStage) -> bool:
    """Return whether a stage takes longer than its layers do by the menu: one with fewer
    microbatches in flight than an equal one may keep more of each."""
    count = placed.candidate.num_microbatches
    after, before = (
        count * (one.forward_seconds + one.backward_seconds) + one.step_seconds
        for one in (made.candidate, placed.candidate)
    )
    return after > before * (1 + MENU_ERROR)


def _limit(
    stage_plan: StagePlan,
    stage: int,
    memory: float,
    solved: Sequence[PlacedStage],
    peaks: Sequence[float],
) -> float:
    """Return the bytes that a stage may use of its devices' `memory`: what the other stages of its
    mesh leave, those already `solved`, with `peaks` bytes, and those to come. It has the most
    transients of them, or as many less as its rows say.
    """
    placed = [*solved, *stage_plan.stages[len(solved) :]]
    held = [*peaks, *stage_plan.peak_bytes[len(solved) :]]
    taken, passing = 0.0, placed[stage].candidate.transient_bytes
    least = 0.0
    for other, one in enumerate(placed):
        if other != stage and one.device_ids == placed[stage].device_ids:
            taken += held[other] - one.candidate.transient_bytes
            least = max(least, one.candidate.transient_bytes - passing)
    return memory - taken - least


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
