"""The planner: from a step and a cluster to a parallel plan with a proven bound.

trace at each microbatch count -> layers -> selection problems on every logical mesh (candidates)
-> stage DP -> the chosen stages solved again exactly, each under its memory limit -> schedule
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    ParallelPlan,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    StageProblem,
)
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.inter_op.candidates import (
    MeshSolution,
    Outlook,
    range_candidates,
    solve_mesh,
)
from alpa_meta.inter_op.layering import Layering
from alpa_meta.inter_op.meshes import device_groups, logical_meshes, submeshes, usable_memory
from alpa_meta.intra_op.memory_limit import solve_within
from alpa_meta.intra_op.selection import Selection, same_choice
from alpa_meta.options import SCHEDULES, Options
from alpa_meta.pinning import UnfitPinError, pinned_axes
from alpa_meta.planning.chosen_plan import (
    Planned,
    chosen_stages,
    finish,
    stage_selection,
    whole_solution,
)
from alpa_meta.planning.collection_pause import collections_paused
from alpa_meta.planning.executor_choice import with_executor
from alpa_meta.planning.memory_floor import check_state_fits
from alpa_meta.planning.menu_search import SEARCHED, search_menu, sized_programs
from alpa_meta.planning.microbatch_counts import larger_counts, microbatch_counts_of
from alpa_meta.planning.operator_names import StageNames
from alpa_meta.planning.outlooks import outlook_in_pieces, outlook_of, staged_outlook
from alpa_meta.planning.plan_cache import searched_once
from alpa_meta.planning.plan_identity import check_program
from alpa_meta.planning.plan_operators import restored_choice
from alpa_meta.planning.remedies import with_remedies
from alpa_meta.step.program import Step
from alpa_meta.user_mesh import with_user_mesh
from cost_model import CostModel, calibrated_model

MEMORY_ROUNDS = 6  # of searching with less memory, where a chosen stage turns out not to fit


@frozen
class _Missing:
    """The bytes that one attempt lacks per device, its number of microbatches, and its mesh where
    it has all devices."""

    bytes: float
    num_microbatches: int = 1
    mesh_shape: tuple[int, ...] | None = None


@frozen(eq=False)
class _Search:
    """The candidates at one microbatch count, and the stage plan found among them."""

    outlook: Outlook
    layering: Layering
    solutions: tuple[MeshSolution, ...]
    problem: StageProblem
    bound: float


def make_plan(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the fastest plan found for `step` on `cluster` that fits its memory.

    Where the same was searched before, that is the plan found then (`plan_cache`). Raises
    InfeasibleError (with the missing bytes and a remedy) when none fits, PlanError for bad input.
    Where nothing fits and the number of microbatches is free, larger numbers are tried.
    """
    with collections_paused():
        check_state_fits(step, cluster, options)
        options = with_user_mesh(step.program(1), cluster, options)
        planned = searched_once(
            step,
            cluster,
            options,
            search=lambda: _make_plan(step, cluster, options),
            restore=lambda plan: restore(step, plan, options),
        )
    _warn(planned, options)
    return planned


def _make_plan(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the best of the plan from the layer menu and of the plans with one stage."""
    failed: InfeasibleError | None = None
    plans: list[Planned] = []
    counts, uncut = microbatch_counts_of(step, options)
    searched = _may_cut(max(counts), cluster, options)
    if searched:
        try:
            found = _from_menu(step, calibrated_model(cluster), options)
        except InfeasibleError as error:
            found, failed = None, error
        if found is not None:
            plans.append(found)
    if plans and options.num_stages is None:
        counts = [options.num_microbatches or 1]
        options = evolve(options, num_stages=1)
    while counts and not (plans and (options.num_stages or 0) > 1):
        try:
            plans.append(_plan_with(counts, step, cluster, options))
            break
        except InfeasibleError as error:
            if failed is None or error.missing_bytes < failed.missing_bytes:
                failed = error
        counts = [] if plans else larger_counts(max(counts), step, options)
    if not plans and not searched and options.recompute is None:
        try:  # what each layer recomputes is chosen from the menu only
            alone = evolve(options, num_microbatches=1) if uncut or step.uncut else options
            found = _from_menu(step, calibrated_model(cluster), alone)
        except InfeasibleError as error:
            found, failed = None, failed or error
        plans += [] if found is None else [found]
    if not plans:
        assert failed is not None
        raise with_remedies(failed, step, cluster, options, _plan_as_told)
    best = min(plans, key=lambda planned: planned.plan.step_seconds)
    bound = min(planned.plan.lower_bound for planned in plans)
    program = evolve(best.plan.program, uncut=uncut)
    return evolve(best, plan=evolve(best.plan, program=program, lower_bound=bound))


def _from_menu(step: Step, model: CostModel, options: Options) -> Planned | None:
    """Return the plan that the joint search chooses, None for a step, cluster or schedule it is
    not for."""
    if options.schedule not in (None, *SEARCHED):
        return None
    cluster = model.cluster
    sized = sized_programs(step, cluster, options)
    if sized is None:
        return None
    outlook = sized["none"][0].outlook
    if options.num_stages is not None and options.num_stages > outlook.num_layers:
        raise PlanError(
            f"{options.num_stages} stages need as many layers, but the forward pass of the step "
            f"cannot be cut into more than {outlook.num_layers}; use "
            f"num_stages={outlook.num_layers}"
        )
    counts = [options.num_microbatches] if options.num_microbatches else None
    meshes = [(submesh, mesh) for submesh, mesh, _ in _meshes(outlook, model, options)]
    axes = pinned_axes(outlook.program, options.pins, [mesh for _, mesh in meshes])
    meshes = [one for one in meshes if axes <= set(one[1].axis_names)] or meshes
    try:
        search = search_menu(step, sized, meshes, model, options, counts)
    except stage_dp.InfeasibleError as error:
        raise InfeasibleError(str(error), error.missing_bytes, None) from None
    if search is None:
        return None

    def choose(_: StageCandidate, selection: Selection, memory: float) -> ShardingSolution:
        return solve_within(selection, options, memory)

    missing = 0.0
    for _ in range(MEMORY_ROUNDS):
        plan = search.stage_plan()
        chosen = options
        if options.recompute is None:
            chosen = evolve(options, recompute=search.recomputation())
        program = step.program(plan.num_microbatches)
        found = outlook_in_pieces(program, chosen, cluster, outlook.num_layers) or outlook_of(
            program, chosen, cluster, outlook.num_layers
        )
        bound = search.plan.lower_bound
        planned = finish(plan, *found, bound, step, model, options, choose)
        if isinstance(planned, Planned):
            return planned
        missing = planned
        try:
            search = search.within_less(missing)
        except stage_dp.InfeasibleError:
            break
    raise InfeasibleError("no pipeline fits the memory", missing, None)


def _plan_as_told(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the plan with the number of microbatches that the options name."""
    check_state_fits(step, cluster, options)
    return _plan_with([options.num_microbatches or 1], step, cluster, options)


def _warn(planned: Planned, options: Options) -> None:
    """Warn of a plan that computes something else than the step, or whose stages wait for each
    other."""
    program, num_stages = planned.program, planned.plan.num_stages
    uncut = planned.plan.program.uncut
    if program.averaged:
        warnings.warn(
            f"{program.num_microbatches} microbatches are not the whole batch for this step: "
            f"{program.averaged[0]}. As Options(exact=False) allows, the step runs on each alone: "
            "its loss, gradients and metrics are the means over the microbatches, its counts sums",
            UserWarning,
            stacklevel=2,
        )
    if num_stages > 1 and program.num_microbatches == 1 and options.num_microbatches is None:
        why = f": {uncut}" if uncut else ""
        warnings.warn(
            f"the {num_stages} stages of this plan run one after the other, none beside another, "
            f"since the batch is taken whole{why}. One stage on all devices is most often faster "
            "(num_stages=1); num_microbatches=1 accepts the plan",
            UserWarning,
            stacklevel=2,
        )


def _plan_with(counts: list[int], step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    model = calibrated_model(cluster)
    searches: list[_Search] = []
    missing: list[_Missing] = []
    outlooks = []
    divided: set[int] = set()  # outlooks with whole scans beside one with scans in pieces
    for number, count in enumerate(counts):
        options.progress("trace", number, len(counts))
        outlooks.append(outlook_of(step.program(count), options, cluster))
        if _may_cut(count, cluster, options):
            pieces = outlook_in_pieces(step.program(count), options, cluster)
            if pieces is not None:
                divided.add(id(outlooks[-1][0]))
                outlooks.append(pieces)
    options.progress("trace", len(counts), len(counts))
    most = max(outlook.num_layers for outlook, _ in outlooks)
    if options.num_stages is not None and options.num_stages > most:
        raise PlanError(
            f"{options.num_stages} stages need as many layers, but the forward pass of the step "
            f"cannot be cut into more than {most}; use num_stages={most}"
        )
    jobs = [
        (outlook, work)
        for outlook, _ in outlooks
        for work in _meshes(outlook, model, options)
        if work[2] or id(outlook) not in divided  # its stages are cut from the program in pieces
        if not work[2] or outlook.cut is None
    ]
    axes = pinned_axes(outlooks[0][0].program, options.pins, [mesh for _, (_, mesh, _) in jobs])
    jobs = [job for job in jobs if axes <= set(job[1][1].axis_names)] or jobs
    unfit: UnfitPinError | None = None
    solved: dict[int, list[MeshSolution]] = {id(outlook): [] for outlook, _ in outlooks}
    whole_fits = False
    for number, (outlook, (submesh, mesh, whole)) in enumerate(jobs):
        options.progress("plan", number, len(jobs) + 1)
        if whole and whole_fits and outlook.program.num_microbatches > min(counts):
            continue  # more microbatches on one mesh only save memory, which is not needed
        limit = usable_memory(cluster, submesh.host_group, options.memory)
        try:
            found, lacking = solve_mesh(outlook, submesh, mesh, model, limit, whole, options)
        except UnfitPinError as error:
            unfit = error
            continue
        solved[id(outlook)] += found
        whole_fits = whole_fits or bool(whole and found)
        if lacking:
            count = outlook.program.num_microbatches
            missing.append(_Missing(lacking, count, mesh.shape if whole else None))
    for outlook, layering in outlooks:
        if solved[id(outlook)]:
            searches.append(
                _search(outlook, layering, tuple(solved[id(outlook)]), model, cluster, options)
            )
    if unfit is not None and not searches:
        raise unfit
    planned = _best(searches, missing, step, cluster, model, options)
    options.progress("plan", len(jobs) + 1, len(jobs) + 1)
    return planned


def restore(step: Step, plan: ParallelPlan, options: Options) -> Planned:
    """Return `plan` made ready for `step`; PlanError with a diff if it is for another program."""
    outlook, layering = staged_outlook(step, plan, options)
    program, staging = chosen_stages(outlook, layering, plan.layer_cuts, plan.stage_plan)
    check_program(plan, program, step)
    model = calibrated_model(plan.cluster)
    names = StageNames(staging)
    selections, shardings = [], []
    for stage, sharding in enumerate(plan.shardings):
        candidate = plan.stage_plan.stages[stage].candidate
        selection = stage_selection(
            program, staging, stage, candidate, plan.stage_plan.in_flight[stage], model, options
        )[1]
        choice = restored_choice(program, names, stage, selection, sharding)
        shardings.append(evolve(sharding, solution=evolve(sharding.solution, choice=choice)))
        selections.append(selection)
    tasks = build_tasks(program, staging)
    plan = with_executor(evolve(plan, shardings=tuple(shardings)), options.executor)
    return Planned(plan, program, staging, tuple(selections), tasks)


def _may_cut(num_microbatches: int, cluster: ClusterSpec, options: Options) -> bool:
    """Return whether plans with several stages are searched."""
    if options.num_stages is not None:
        return options.num_stages > 1
    return cluster.num_devices > 1 and (num_microbatches > 1 or len(cluster.host_groups) > 1)


def _meshes(outlook: Outlook, model: CostModel, options: Options) -> list[tuple[Any, Any, bool]]:
    """Return (submesh, logical mesh, whether it is the whole cluster) to solve on."""
    cluster = model.cluster
    found = []
    single = outlook.program.num_microbatches == 1
    for submesh in submeshes(cluster):
        whole = submesh.num_devices == cluster.num_devices
        if options.num_stages == 1 and not whole and len(cluster.host_groups) == 1:
            continue
        if options.num_stages is not None and options.num_stages > 1:
            if submesh.num_devices > cluster.num_devices - _other_meshes(options):
                continue
        elif options.num_stages is None and single and not whole and cluster.num_devices > 1:
            continue  # pipelines are planned with more microbatches
        most = max(options.max_mesh_axes, len(options.mesh_shape or ()))
        ordered = bool(options.pins or options.preset or options.mesh_shape)
        # the order decides which axis is the minor one of a dim, which matters little; on the whole
        # cluster no named parallelism is to find a mesh that the planner did not try
        for mesh in logical_meshes(model, submesh, most, options.axis_names, ordered or whole):
            if options.mesh_shape in (None, mesh.shape):
                found.append((submesh, mesh, whole))
    if not found:
        raise PlanError(
            f"no logical mesh is left to plan for: num_stages={options.num_stages}, "
            f"mesh_shape={options.mesh_shape}, {cluster.num_devices} devices in {cluster.name!r}"
        )
    return found


def _other_meshes(options: Options) -> int:
    """Return how many meshes there are at least beside that of one stage."""
    if options.schedule and stage_dp.SCHEDULE_RULES[options.schedule].interleaves:
        return 1  # two may run any number of stages
    return (options.num_stages or 1) - 1


def _schedules(options: Options) -> tuple[str, ...]:
    if options.schedule is not None:
        return (options.schedule,)
    return SCHEDULES[:1] if options.num_stages == 1 else SCHEDULES  # one stage has one order


def _search(
    outlook: Outlook,
    layering: Layering,
    solutions: tuple[MeshSolution, ...],
    model: CostModel,
    cluster: ClusterSpec,
    options: Options,
) -> _Search:
    problem = StageProblem(
        num_layers=outlook.num_layers,
        device_groups=device_groups(cluster, options.memory),
        candidates=tuple(range_candidates(outlook, solutions, model)),
        schedules=_schedules(options),
        num_stages=options.num_stages,
    )
    floors = evolve(
        problem, candidates=tuple(range_candidates(outlook, solutions, model, floor=True))
    )
    try:
        bound = stage_dp.solve_stages(floors).lower_bound
    except ValueError:
        bound = 0.0
    return _Search(outlook, layering, solutions, problem, bound)


def _best(
    searches: list[_Search],
    missing: list[_Missing],
    step: Step,
    cluster: ClusterSpec,
    model: CostModel,
    options: Options,
) -> Planned:
    chosen: list[tuple[float, StagePlan, _Search]] = []
    gaps: list[str] = []
    for search in searches:
        try:
            plan = stage_dp.solve_stages(search.problem)
        except stage_dp.InfeasibleError as error:
            missing.append(_Missing(error.missing_bytes))
            gaps.append(str(error))
            continue
        chosen.append((plan.step_seconds, plan, search))
    chosen.sort(key=lambda item: item[0])
    bound = min((search.bound for search in searches), default=0.0)
    while chosen:
        _, plan, search = chosen.pop(0)

        def choose(
            candidate: StageCandidate, selection: Selection, memory: float, search: _Search = search
        ) -> ShardingSolution:
            known = whole_solution(candidate, search.solutions)
            same = known and same_choice(known.selection, known.solution.choice or (), selection)
            if known and same and selection.memory.peak(same).total <= memory:
                return evolve(known.solution, choice=same)
            return solve_within(selection, options, memory)

        outlook, layering = search.outlook, search.layering
        planned = finish(plan, outlook, layering, bound, step, model, options, choose)
        if isinstance(planned, Planned):
            return planned
        missing.append(_Missing(planned))
        rest = _without(search.problem, plan)
        if rest is not None:
            try:
                again = stage_dp.solve_stages(rest)
            except stage_dp.InfeasibleError as error:
                missing.append(_Missing(error.missing_bytes))
            else:
                chosen.append((again.step_seconds, again, evolve(search, problem=rest)))
                chosen.sort(key=lambda item: item[0])
    raise _infeasible(missing, gaps, cluster, options)


def _without(problem: StageProblem, plan: StagePlan) -> StageProblem | None:
    """Return the problem without the candidates of a plan that turned out not to fit."""
    used = {stage.candidate for stage in plan.stages}
    left = tuple(c for c in problem.candidates if c not in used)
    return evolve(problem, candidates=left) if left else None


def _infeasible(
    missing: list[_Missing], gaps: list[str], cluster: ClusterSpec, options: Options
) -> InfeasibleError:
    least = min((one.bytes for one in missing if one.bytes > 0), default=0.0)
    whole = [one for one in missing if one.bytes > 0 and one.mesh_shape is not None]
    closest = min(whole, key=lambda one: one.bytes) if whole else _Missing(least)
    limit = usable_memory(cluster, 0, options.memory)
    detail = f" ({gaps[0]})" if gaps and not least else ""
    return InfeasibleError(
        f"no plan fits the memory: each device has {limit:,.0f} bytes for the program and lacks at "
        f"least {math.ceil(least):,} more on cluster {cluster.name!r}{detail}",
        least,
        closest.mesh_shape,
        closest.num_microbatches,
    )
