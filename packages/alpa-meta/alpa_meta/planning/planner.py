"""The planner: from a step and a cluster to a parallel plan with a proven bound.

pipelines   from the layer menu, by the joint search                    -> menu_search
one stage   by the whole program's solution on each logical mesh        -> range_search
no room     with the optimiser's arrays in the memory of the hosts      -> offload_choice
chosen      stages solved exactly, each under its memory limit          -> chosen_plan.finish
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

from attrs import evolve

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    KeptMenu,
    ParallelPlan,
)
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.inter_op.meshes import splits_hosts_twice
from alpa_meta.inter_op.recomputation import chosen_recomputation
from alpa_meta.intra_op.equal_stages import Stages
from alpa_meta.options import Options
from alpa_meta.pinning import pinned_axes
from alpa_meta.planning.batch_search import trace_step
from alpa_meta.planning.chosen_plan import Planned, chosen_stages
from alpa_meta.planning.collection_pause import collections_paused
from alpa_meta.planning.executor_choice import with_executor
from alpa_meta.planning.finished_search import Finish, step_seconds_of
from alpa_meta.planning.kept_menu import keep
from alpa_meta.planning.least_memory import check_step_fits, may_hold
from alpa_meta.planning.memory_floor import check_state_fits
from alpa_meta.planning.menu_search import bound_by_floors, search_menu, sized_programs
from alpa_meta.planning.microbatch_counts import check_exact, larger_counts, microbatch_counts_of
from alpa_meta.planning.offload_choice import with_offload
from alpa_meta.planning.operator_names import StageNames
from alpa_meta.planning.outlooks import (
    check_num_stages,
    short_step_of,
    staged_outlook,
)
from alpa_meta.planning.plan_cache import searched_once
from alpa_meta.planning.plan_claims import check_claims, check_consistent, with_claims
from alpa_meta.planning.plan_identity import check_program
from alpa_meta.planning.plan_operators import restored_choice
from alpa_meta.planning.plan_summary import layer_summaries, program_summary
from alpa_meta.planning.range_search import (
    Prospect,
    may_cut,
    meshes_to_plan,
    plan_by_ranges,
)
from alpa_meta.planning.remedies import with_remedies
from alpa_meta.planning.slice_choice import may_slice, with_slices
from alpa_meta.planning.solved_stages import finished_stage, stage_selection
from alpa_meta.program_caches import programs_forgotten
from alpa_meta.step.program import Step
from alpa_meta.token_slices.places import SliceRequest
from alpa_meta.user_mesh import with_user_mesh
from cost_model import CostModel, calibrated_model

# Of the seconds of a plan of one stage: what one with more microbatches may take by the menu's rows
# to be solved exactly, which took 0.95 (two problems of `_just_fitting`) and 0.87 of it (LLaMA-8B
# on 64 H100, where the other plan takes 0.74).
ROWS_TAKE_MORE = 1.2
# Of the seconds of a plan with one stage, the bound by floors that is asked for, and the share of
# that which does (`bound_by_floors`): then pipelines are 0.2 % faster at most, no menu is made. The
# U-Net of Stable Diffusion and 16 Evoformer blocks have gaps of 0.1 % so; others were not tried.
NO_BETTER = 0.999


def make_plan(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the fastest plan found for `step` on `cluster` that fits its memory.

    Where the same was searched before, that is the plan found then (`plan_cache`). Raises
    InfeasibleError (with the missing bytes and a remedy) when none fits, PlanError for bad input.
    Where nothing fits and the number of microbatches is free, larger numbers are tried.
    """
    _check_stages(cluster, options)
    with collections_paused(), programs_forgotten():
        trace_step(step, cluster, options)
        options = with_user_mesh(step.program(1), cluster, options)
        planned = searched_once(
            step,
            cluster,
            options,
            search=lambda: with_offload(
                step,
                cluster,
                options,
                plan=_sliced_or_whole,
                advised=lambda failed: with_remedies(failed, step, cluster, options, _plan_as_told),
            ),
            restore=lambda plan: restore(step, plan, options),
        )
    _warn(planned, options)
    return planned


def _check_stages(cluster: ClusterSpec, options: Options) -> None:
    """Raise PlanError for a number of stages that no schedule asked for can have on the devices."""
    num, devices = options.num_stages, cluster.num_devices
    if num is None:
        return
    interleaves = {stage_dp.SCHEDULE_RULES[name].interleaves for name in options.schedules}
    shared = {meshes * each for meshes in range(2, devices + 1) for each in stage_dp.CHUNKS}
    if not (False in interleaves and num <= devices or True in interleaves and num in shared):
        each = ", ".join(map(str, stage_dp.CHUNKS))
        raise PlanError(
            f"num_stages={num} with schedule={options.schedule!r} is not possible on the {devices} "
            f"devices of {cluster.name!r}: each stage needs a mesh of its own, but with "
            f"'interleaved-1f1b', where each of 2 or more meshes runs one of {each} stages; give "
            "another number, or leave it out"
        )


def _sliced_or_whole(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the best plan of the step as it is, or in token slices where they are faster."""
    planned = _make_plan(step, cluster, options)
    if not may_slice(step, cluster, options):
        return planned
    menu = planned.menu if isinstance(planned.menu, KeptMenu) else _menu(step, cluster, options)
    if menu is None:
        return planned
    return with_slices(
        planned,
        menu,
        step,
        cluster,
        options,
        lambda sliced, told: _make_plan(sliced, cluster, told),
    )


def _menu(step: Step, cluster: ClusterSpec, options: Options) -> KeptMenu | None:
    """Return the menu of a step whose batch nothing cuts, None where it has none."""
    whole = evolve(options, num_microbatches=options.num_microbatches or 1)
    found = _found(lambda: _from_menu(step, calibrated_model(cluster), whole))
    return found[0].menu if isinstance(found, tuple) else None


def _make_plan(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the best of the plan from the layer menu and of the plans with one stage."""
    failed: list[InfeasibleError] = []
    prospects: list[Prospect] = []
    bounds: list[float] = []

    def consider(found: tuple[Prospect, float] | PlanError | None) -> None:
        if isinstance(found, InfeasibleError):
            failed.append(found)
        elif isinstance(found, PlanError):
            raise found
        elif found is not None:
            prospects.append(found[0])
            bounds.append(found[1])

    short = short_step_of(step, options, cluster) if may_cut(2, cluster, options) else None
    counts, uncut = microbatch_counts_of(step, options, short)
    model, told = calibrated_model(cluster), options
    check_step_fits(step, model, options)
    searched = may_cut(max(counts), cluster, options)
    if searched:
        alone, worth, enough = None, math.inf, math.inf
        if options.num_stages is None:
            alone = _found(lambda: _one_stage(step, model, told))
            if isinstance(alone, tuple):
                # Both bounds hold together, so that the menu's need not be above the other: of 24
                # layers of 2048 on 16 H100 the joint search takes 0.3 instead of 2.7 CPU s.
                worth, enough = alone[0].seconds, alone[1]
        consider(_found(lambda: _from_menu(step, model, told, enough, worth)))
        if prospects and options.num_stages is None:
            if prospects[0].seconds < ROWS_TAKE_MORE * worth:
                prospects += _just_fitting(prospects[0], step, model, told)
            consider(alone)
            counts, options = [], evolve(options, num_stages=1)
    else:
        counts = counts[:1]  # on one device, or as one stage, fewer microbatches are never slower
    while counts and not (prospects and (options.num_stages or 0) > 1):
        known = len(prospects)
        consider(_found(functools.partial(plan_by_ranges, counts, step, cluster, options)))
        if len(prospects) == known and not searched:
            searched = True  # the menu has all numbers of microbatches, and recomputation
            whole = evolve(options, num_microbatches=1) if uncut or step.uncut else options
            consider(_found(functools.partial(_from_menu, step, model, whole)))
            prospects += [
                one
                for found in prospects[known:]
                for one in _just_fitting(found, step, model, told)
            ]
        if len(prospects) > known:
            break
        counts = [] if prospects else larger_counts(max(counts), step, options)
    best = _finished(prospects, failed)
    if best is None:
        least = min(failed, key=lambda error: error.missing_bytes or math.inf)  # 0: not known
        raise least
    found = _on_parts(best, bounds, step, model, told)
    if found is not None:
        consider(found)
        best = min(best, _finished(prospects[-1:], failed) or best, key=step_seconds_of)
    program = evolve(best.plan.program, uncut=uncut)
    own = [] if best.plan.num_stages == 1 else [best.plan.lower_bound]  # 0 where it did not hold
    bound = min(*bounds, *own, best.plan.step_seconds)
    menu = next((one.menu for one in prospects if one.menu is not None), None)
    return evolve(best, menu=menu, plan=evolve(best.plan, program=program, lower_bound=bound))


def _found(
    search: Callable[[], tuple[Prospect, float] | None],
) -> tuple[Prospect, float] | PlanError | None:
    """Return what a search finds, or why it finds nothing."""
    try:
        return search()
    except PlanError as error:
        return error


def _one_stage(step: Step, model: CostModel, options: Options) -> tuple[Prospect, float] | None:
    """Return the best plan that runs the step as one stage in as few microbatches as may be, and
    its bound; None where it is known not to fit: the menu has one stage with more microbatches."""
    counts = [options.num_microbatches or 1]
    options = evolve(options, num_stages=1)
    kept = options.recompute or "none"  # such plans recompute what the options name only
    if not may_hold(step, model, evolve(options, num_microbatches=counts[0], recompute=kept)):
        return None
    return plan_by_ranges(counts, step, model.cluster, options)


def _on_parts(
    best: Planned, bounds: list[float], step: Step, model: CostModel, options: Options
) -> tuple[Prospect, float] | None:
    """Return the best plan with one stage on any part of the devices and its bound, where `best`
    is such a plan or takes less than the menu's bound: that is of the two programs of stages.

    None: `best` is none, or the part cannot be told.
    """
    whole = best.plan.stage_plan.stages[0].candidate.submesh.num_devices
    proven = best.plan.step_seconds >= min(bounds) and whole == model.cluster.num_devices
    if best.plan.num_stages > 1 or proven or len(model.cluster.host_groups) > 1:
        return None
    counts = sorted({options.num_microbatches or 1, best.plan.num_microbatches})
    told = evolve(options, num_stages=1)
    found = _found(lambda: plan_by_ranges(counts, step, model.cluster, told, on_parts=True))
    return found if isinstance(found, tuple) else None


def _just_fitting(
    found: Prospect, step: Step, model: CostModel, options: Options
) -> list[Prospect]:
    """Return the plans with one stage that recomputes nothing where the menu's takes longer for
    memory: rows hold a little more than exact solutions under a limit, which may just fit. GPT of
    16 layers of 2560 on 8 V100 takes 4.57 s so, not 4.80; MoE-1.3B of 8 layers on one 0.781 s, not
    0.819."""
    if options.recompute is not None:
        return []
    result = []
    for count in found.nearly_fitting:
        told = evolve(options, recompute="none", num_microbatches=count)
        exact = _found(functools.partial(_one_stage, step, model, told))
        if isinstance(exact, tuple):
            result.append(exact[0])
    return result


def _finished(prospects: list[Prospect], failed: list[InfeasibleError]) -> Planned | None:
    """Return the best plan with its stages solved, None if none fits; what is predicted to be
    slower than a plan at hand is not solved."""
    best: Planned | None = None
    for prospect in sorted(prospects, key=lambda one: one.seconds):
        if best is not None and best.plan.step_seconds <= prospect.seconds:
            break
        try:
            planned = prospect.finish()
        except InfeasibleError as error:
            failed.append(error)
            continue
        if best is None or planned.plan.step_seconds < best.plan.step_seconds:
            best = planned
    return best


def _from_menu(
    step: Step,
    model: CostModel,
    options: Options,
    enough: float = math.inf,
    worth: float = math.inf,
) -> tuple[Prospect, float] | None:
    """Return the plan that the joint search chooses, or any where none takes less than `worth`
    seconds, and its bound, which is not raised above `enough`; None for a step or cluster it is not
    for."""
    cluster = model.cluster
    sized = sized_programs(step, cluster, options)
    if sized is None:
        return None
    outlook = sized["none"][0].outlook
    check_num_stages(options.num_stages, outlook)
    if all(layer is None for layer in outlook.staging.layers):
        return None  # gradients are made inside a loop: there is no forward pass to be cut
    told = [options.num_microbatches] if options.num_microbatches else None
    planned = meshes_to_plan(outlook, model, options)
    meshes = list(dict.fromkeys((submesh, mesh) for submesh, mesh, _ in planned))
    if not (options.pins or options.preset or options.mesh_shape):  # which name axes
        # one stage on all devices is planned on every mesh beside the menu (`plan_by_ranges`)
        meshes = [one for one in meshes if not splits_hosts_twice(one[0], one[1].shape)]
    axes = pinned_axes(outlook.program, options.pins, [mesh for _, mesh in meshes])
    meshes = [one for one in meshes if axes <= set(one[1].axis_names)] or meshes
    if worth < math.inf:
        bound = bound_by_floors(step, sized, meshes, model, options, told, NO_BETTER * worth)
        if bound >= NO_BETTER * NO_BETTER * worth:

            def searched() -> Planned:
                found = _from_menu(step, model, options)
                assert found is not None
                return found[0].finish()

            return Prospect(math.inf, searched), bound
    try:
        search = search_menu(step, sized, meshes, model, options, told, enough, worth)
    except stage_dp.InfeasibleError as error:
        raise InfeasibleError(str(error), error.missing_bytes, None) from None
    if search is None:
        return None
    plan = search.plan

    def finish() -> Planned:
        """Finish the plan; a slower one is asked for where what is faster turned out not to fit."""
        best = search.searched_on() if plan.step_seconds > worth else search
        return Finish(outlook.num_layers, step, model, options).run(best)

    sliced = search.num_slices > 1
    menu = None if sliced else keep(search, outlook, step, cluster, options)
    counts = search.nearly_fitting() if len(plan.stages) == 1 else ()
    return Prospect(plan.step_seconds, finish, menu, counts), search.bound


def _plan_as_told(step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    """Return the plan with the number of microbatches that the options name."""
    check_state_fits(step, cluster, options)
    return plan_by_ranges([options.num_microbatches or 1], step, cluster, options)[0].finish()


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
    one_by_one = program.num_microbatches == 1 and program.slices is None
    if num_stages > 1 and one_by_one and options.num_microbatches is None:
        why = f": {uncut}" if uncut else ""
        warnings.warn(
            f"the {num_stages} stages of this plan run one after the other, none beside another, "
            f"since the batch is taken whole{why}. One stage on all devices is most often faster "
            "(num_stages=1); num_microbatches=1 accepts the plan",
            UserWarning,
            stacklevel=2,
        )


def _offloads(plan: ParallelPlan) -> bool:
    return any(one.memory != "device" for one in plan.program.inputs)


def _check_told(plan: ParallelPlan, options: Options) -> None:
    """Raise PlanError where options beside a plan of the user's ask for another one."""
    kinds = tuple(layer.recomputation for layer in plan.layers)
    shapes = {stage.candidate.logical.shape for stage in plan.stage_plan.stages}
    has = {
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.stage_plan.schedule,
        "num_token_slices": max(len(plan.program.token_slices), 1),
        "token_slices": plan.program.token_slices,
        "num_layers": len(kinds),
        "recompute": kinds,
        "offload": "moments" if _offloads(plan) else "none",
        "mesh_shape": shapes.pop() if len(shapes) == 1 else None,
    }
    for name, value in has.items():
        told = getattr(options, name)
        if told is not None and name == "recompute":
            told = tuple(chosen_recomputation(told, len(kinds)).values())
        if told not in (None, value):
            raise PlanError(
                f"the plan that is given has {name}={value!r}, but {name}={told!r} is asked for; "
                "leave one of them out"
            )
    held = max(plan.device_bytes)
    if options.memory is not None and held > options.memory * (1 + 1e-9):  # of sums
        raise PlanError(
            f"the plan that is given holds {held:,.0f} bytes on a device, but memory="
            f"{options.memory:,.0f} is asked for; leave one of them out"
        )


@programs_forgotten()
def restore(step: Step, plan: ParallelPlan, options: Options) -> Planned:
    """Return `plan` made ready for `step`; PlanError with a diff if it is for another program."""
    if options.plan is not None:
        _check_told(plan, options)
    if plan.program.token_slices and not step.slices:  # the planner's choice
        step = step.in_slices(SliceRequest(plan.program.token_slices))
    if not step.offloads and _offloads(plan):
        step = step.with_offload()
    check_consistent(plan)
    check_exact(step, plan.num_microbatches, options)
    outlook, layering = staged_outlook(step, plan, options)
    program, staging = chosen_stages(outlook, layering, plan.layer_cuts, plan.stage_plan)
    check_program(plan, program, step)
    model = calibrated_model(plan.cluster)
    names = StageNames(staging, program.jaxpr.constvars)
    selections, shardings, stages = [], [], []
    built = Stages()
    for stage, sharding in enumerate(plan.shardings):
        placed = plan.stage_plan.stages[stage]
        scope, selection = stage_selection(
            program,
            staging,
            stage,
            plan.stage_plan,
            model,
            options,
            built,
        )
        choice = restored_choice(program, names, stage, selection, sharding)
        try:
            made, again = finished_stage(
                program,
                staging,
                stage,
                placed,
                (scope, selection),
                evolve(sharding.solution, choice=choice),
                outlook.num_layers,
                names,
                sharding.executor,
            )
        except (ValueError, ArithmeticError) as error:  # a link of 1e-320 bytes/s, say
            raise PlanError(
                f"the plan's cluster gives stage {stage} no possible figures: {error}; plan again"
            ) from error
        shardings.append(again)
        stages.append(made)
        selections.append(selection)
    tasks = build_tasks(program, staging)
    if plan.tasks is not None:  # not of plans of schema 0.1 and 0.2
        rebuilt = evolve(
            plan,
            program=program_summary(program, step, plan.program.fingerprint),
            tasks=tasks.graph,
            layers=layer_summaries(outlook, layering),
        )
        check_claims(plan, with_claims(rebuilt, shardings, stages))
    kept = (
        evolve(one, solution=made.solution)
        for one, made in zip(plan.shardings, shardings, strict=True)
    )
    plan = evolve(plan, shardings=tuple(kept), tasks=tasks.graph, schedule=None)
    plan = with_executor(plan, options.executor)
    return Planned(plan, program, staging, tuple(selections), tasks)
