"""Plans whose stages are ranges of layers of the whole program, solved once on each logical mesh.

trace at each microbatch count -> layers -> selection problems on every logical mesh (candidates)
-> stage DP -> the chosen stages solved exactly, each under its memory limit (`chosen_plan`)

This is how plans of one stage are found, and pipelines where the batch is taken whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    KeptMenu,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    StageProblem,
)
from alpa_meta.errors import InfeasibleError, PlanError
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
from alpa_meta.options import Options
from alpa_meta.pinning import UnfitPinError, pinned_axes
from alpa_meta.planning.chosen_plan import (
    Planned,
    finish,
    whole_solution,
)
from alpa_meta.planning.outlooks import check_num_stages, outlook_in_pieces, outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, calibrated_model

if TYPE_CHECKING:
    from alpa_interchange import LogicalMesh, SubmeshSpec


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


@frozen(eq=False)
class Prospect:
    """A plan before its stages are solved exactly: its predicted seconds, and what does so.

    `finish` raises InfeasibleError where the stages turn out not to fit; `menu` is what it was
    chosen from. `nearly_fitting`: numbers of microbatches for one stage that may be faster, and
    that is short of memory by the menu.
    """

    seconds: float
    finish: Callable[[], Planned]
    menu: KeptMenu | None = None
    nearly_fitting: tuple[int, ...] = ()


def plan_by_ranges(
    counts: list[int],
    step: Step,
    cluster: ClusterSpec,
    options: Options,
    on_parts: bool = False,
) -> tuple[Prospect, float]:
    """Return the best plan with one of so many microbatches whose stages are ranges of layers of
    the whole program's solutions, and its bound (`on_parts`: `meshes_to_plan`)."""
    model = calibrated_model(cluster)
    searches: list[_Search] = []
    missing: list[_Missing] = []
    outlooks = []
    divided: set[Outlook] = set()  # those with whole scans beside one with scans in pieces
    for number, count in enumerate(counts):
        options.progress("trace", number, len(counts))
        outlooks.append(outlook_of(step.program(count), options, cluster))
        if may_cut(count, cluster, options):
            pieces = outlook_in_pieces(step.program(count), options, cluster)
            if pieces is not None:
                divided.add(outlooks[-1][0])
                outlooks.append(pieces)
    options.progress("trace", len(counts), len(counts))
    most = max((outlook for outlook, _ in outlooks), key=lambda outlook: outlook.num_layers)
    check_num_stages(options.num_stages, most)
    jobs = [
        (outlook, work)
        for outlook, _ in outlooks
        for work in meshes_to_plan(outlook, model, options, on_parts)
        if work[2] or outlook not in divided  # its stages are cut from the program in pieces
        if not work[2] or outlook.cut is None
        if work[2] or outlook.num_layers > 1  # else there is nothing to be cut
    ]
    axes = pinned_axes(outlooks[0][0].program, options.pins, [mesh for _, (_, mesh, _) in jobs])
    jobs = [job for job in jobs if axes <= set(job[1][1].axis_names)] or jobs
    unfit: UnfitPinError | None = None
    solved: dict[Outlook, list[MeshSolution]] = {outlook: [] for outlook, _ in outlooks}
    whole_fits: set[SubmeshSpec] = set()
    for number, (outlook, (submesh, mesh, whole)) in enumerate(jobs):
        options.progress("plan", number, len(jobs) + 1)
        if submesh in whole_fits and outlook.program.num_microbatches > min(counts) and whole:
            continue  # more microbatches on one mesh only save memory, which is not needed
        limit = usable_memory(cluster, submesh.host_group, options.memory)
        try:
            found, lacking = solve_mesh(outlook, submesh, mesh, model, limit, whole, options)
        except UnfitPinError as error:
            unfit = error
            continue
        solved[outlook] += found
        whole_fits |= {submesh} if whole and found else set()
        if lacking:
            count = outlook.program.num_microbatches
            missing.append(_Missing(lacking, count, mesh.shape if whole else None))
    for outlook, layering in outlooks:
        if solved[outlook]:
            searches.append(
                _search(outlook, layering, tuple(solved[outlook]), model, cluster, options)
            )
    if unfit is not None and not searches:
        raise unfit
    options.progress("plan", len(jobs) + 1, len(jobs) + 1)
    return _best(searches, missing, step, cluster, model, options)


def may_cut(num_microbatches: int, cluster: ClusterSpec, options: Options) -> bool:
    """Return whether plans with several stages are searched."""
    if options.num_stages is not None:
        return options.num_stages > 1
    return cluster.num_devices > 1 and (num_microbatches > 1 or len(cluster.host_groups) > 1)


def meshes_to_plan(
    outlook: Outlook, model: CostModel, options: Options, on_parts: bool = False
) -> list[tuple[SubmeshSpec, LogicalMesh, bool]]:
    """Return (submesh, logical mesh, whether all layers run there as one program) to solve on.

    One stage has all devices, or, where they are of several kinds or `on_parts`, any of the
    submeshes: its passes are one program there, which is quicker than those of stages.
    """
    cluster = model.cluster
    found = []
    kinds = len(cluster.host_groups)
    one_by_one = outlook.program.num_microbatches == 1 and options.num_stages is None
    for submesh in submeshes(cluster):
        whole = submesh.num_devices == cluster.num_devices
        ways = []
        if options.num_stages in (None, 1) and (whole or kinds > 1 or on_parts):
            ways.append(True)
        room = submesh.num_devices <= cluster.num_devices - _other_meshes(options)
        if not whole and options.num_stages != 1 and room and not (one_by_one and kinds == 1):
            ways.append(False)  # pipelines are planned with more microbatches, if there may be more
        if not ways:
            continue
        most = max(options.max_mesh_axes, len(options.mesh_shape or ()))
        ordered = bool(options.pins or options.preset or options.mesh_shape)
        # the order decides which axis is the minor one of a dim, which matters little; on the whole
        # cluster no named parallelism is to find a mesh that the planner did not try
        for mesh in logical_meshes(model, submesh, most, options.axis_names, ordered or whole):
            if options.mesh_shape in (None, mesh.shape):
                found += [(submesh, mesh, way) for way in ways]
    if not found:
        raise PlanError(
            f"no logical mesh is left to plan for: num_stages={options.num_stages}, "
            f"schedule={options.schedule!r}, mesh_shape={options.mesh_shape}, "
            f"{cluster.num_devices} devices in {cluster.name!r}; each stage "
            "needs a mesh of its own, but with 'interleaved-1f1b', where two or more run as many "
            "stages each"
        )
    return found


def _other_meshes(options: Options) -> int:
    """Return how many meshes there are at least beside that of one stage."""
    num = options.num_stages or 1
    if any(stage_dp.SCHEDULE_RULES[name].interleaves for name in options.schedules):
        shared = [meshes for meshes in range(2, num // 2 + 1) if num % meshes == 0]
        num = min(shared, default=num)  # which run as many stages each
    return num - 1


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
        # one stage has one order
        schedules=options.schedules[:1] if options.num_stages == 1 else options.schedules,
        num_stages=options.num_stages,
    )
    floors = evolve(
        problem, candidates=tuple(range_candidates(outlook, solutions, model, floor=True))
    )
    try:
        bound = stage_dp.solve_stages(floors).lower_bound
    except ValueError:
        bound = 0.0
    if outlook.program.slices is not None:
        bound = stage_dp.bound_in_slices(bound, options.num_stages or cluster.num_devices)
    return _Search(outlook, layering, solutions, problem, bound)


def _best(
    searches: list[_Search],
    missing: list[_Missing],
    step: Step,
    cluster: ClusterSpec,
    model: CostModel,
    options: Options,
) -> tuple[Prospect, float]:
    """Return the plan with the least predicted seconds, and a bound of all; InfeasibleError if no
    stages fit."""
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
    if not chosen:
        raise _infeasible(missing, gaps, cluster, options)

    def finished() -> Planned:
        return _finish_best(chosen, bound, missing, gaps, step, model, options)

    return Prospect(chosen[0][0], finished), bound


def _finish_best(
    chosen: list[tuple[float, StagePlan, _Search]],
    bound: float,
    missing: list[_Missing],
    gaps: list[str],
    step: Step,
    model: CostModel,
    options: Options,
) -> Planned:
    """Return the first of the plans whose stages fit when solved exactly, searching again without
    those that do not."""
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
        missing.append(_Missing(planned.bytes))
        rest = _without(search.problem, plan)
        if rest is not None:
            try:
                again = stage_dp.solve_stages(rest)
            except stage_dp.InfeasibleError as error:
                missing.append(_Missing(error.missing_bytes))
            else:
                chosen.append((again.step_seconds, again, evolve(search, problem=rest)))
                chosen.sort(key=lambda item: item[0])
    raise _infeasible(missing, gaps, model.cluster, options)


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
