"""The planner: from a step and a cluster to a parallel plan with a proven bound.

trace at each microbatch count -> layers -> selection problems on every logical mesh (candidates)
-> stage DP -> the chosen stages solved again exactly, each under its memory limit -> schedule
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np
from attrs import evolve, frozen

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    DeviceGroup,
    DeviceMesh,
    InputSummary,
    Layer,
    ParallelPlan,
    PlacedStage,
    ProgramSummary,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    StageProblem,
    StageSharding,
)
from alpa_meta.candidates import (
    MeshSolution,
    Outlook,
    exact_candidate,
    input_pins,
    microbatch_counts,
    range_candidates,
    solve,
    solve_mesh,
)
from alpa_meta.compat import Literal, name_stack
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.folding import eqn_signature, fold_keys, layer_classes
from alpa_meta.intra_op import Selection, build
from alpa_meta.layering import Layering, assign_layers, tensor_bytes
from alpa_meta.mesh_costs import MeshCosts
from alpa_meta.meshes import logical_meshes, memory_per_device, submeshes
from alpa_meta.options import Options
from alpa_meta.pinning import UnfitPinError, pinned_axes
from alpa_meta.program import Program, Step
from alpa_meta.rules import flops, sharding_rule
from alpa_meta.stage_selection import StageCosts, boundary_bytes, stage_scope
from alpa_meta.staging import Staging, assign_stages
from alpa_meta.tasks import Tasks, build_tasks
from cost_model import CostModel, calibrated_model

_PACKAGES = (
    "alpa-meta",
    "alpa-interchange",
    "cost-model",
    "ilp-sharding",
    "stage-dp",
    "resharding",
    "mesh-runtime",
    "jax",
)


Choose = Callable[[StageCandidate, Selection, float], ShardingSolution]
"""From a stage's candidate, its selection problem and a limit in bytes to a choice of strategies."""


@frozen(eq=False)
class Planned:
    """A plan together with the program it is for, ready to be compiled."""

    plan: ParallelPlan
    program: Program
    staging: Staging
    selections: tuple[Selection, ...]
    tasks: Tasks


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

    Raises InfeasibleError (with the missing bytes and a remedy) when none fits, PlanError for bad
    input. Where nothing fits and the number of microbatches is free, larger numbers are tried.
    """
    failed: InfeasibleError | None = None
    counts = _counts(step, options)
    while counts:
        try:
            return _plan_with(counts, step, cluster, options)
        except InfeasibleError as error:
            if failed is None or error.missing_bytes < failed.missing_bytes:
                failed = error
        counts = _larger_counts(max(counts), step, options)
    assert failed is not None
    raise failed


def _larger_counts(tried: int, step: Step, options: Options) -> list[int]:
    """Return the next numbers of microbatches to try for their smaller activations."""
    if options.num_microbatches is not None or (step.program(1).inexact and options.exact):
        return []
    larger = [
        count for count in range(4 * tried, step.batch_size + 1) if step.batch_size % count == 0
    ]
    return larger[:1]


def _plan_with(counts: list[int], step: Step, cluster: ClusterSpec, options: Options) -> Planned:
    model = calibrated_model(cluster)
    searches: list[_Search] = []
    missing: list[float] = []
    outlooks = []
    for number, count in enumerate(counts):
        options.progress("trace", number, len(counts))
        outlooks.append(outlook_of(step.program(count), options))
    options.progress("trace", len(counts), len(counts))
    jobs = [(outlook, work) for outlook, _ in outlooks for work in _meshes(outlook, model, options)]
    axes = pinned_axes(outlooks[0][0].program, options.pins, [mesh for _, (_, mesh, _) in jobs])
    jobs = [job for job in jobs if axes <= set(job[1][1].axis_names)] or jobs
    unfit: UnfitPinError | None = None
    solved: dict[int, list[MeshSolution]] = {id(outlook): [] for outlook, _ in outlooks}
    whole_fits = False
    for number, (outlook, (submesh, mesh, whole)) in enumerate(jobs):
        options.progress("plan", number, len(jobs) + 1)
        if whole and whole_fits and outlook.program.num_microbatches > min(counts):
            continue  # more microbatches on one mesh only save memory, which is not needed
        limit = _memory(cluster, submesh.host_group, options)
        try:
            found, lacking = solve_mesh(outlook, submesh, mesh, model, limit, whole, options)
        except UnfitPinError as error:
            unfit = error
            continue
        solved[id(outlook)] += found
        whole_fits = whole_fits or bool(whole and found)
        if lacking:
            missing.append(lacking)
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
    program = step.program(plan.num_microbatches)
    check_program(plan, program, step)
    outlook, layering = outlook_of(program, options, len(plan.layers))
    staging = assign_stages(layering, plan.layer_cuts, program.jaxpr.outvars)
    model = calibrated_model(plan.cluster)
    selections = []
    for stage, sharding in enumerate(plan.shardings):
        candidate = plan.stage_plan.stages[stage].candidate
        selection = _stage_selection(
            program, staging, stage, candidate, plan.stage_plan.in_flight[stage], model, options
        )[1]
        if problem_hash(selection) != sharding.problem_hash:
            raise PlanError(
                f"stage {stage} of the plan was made from other sharding rules or strategies than "
                f"this version enumerates (it was written by {dict(plan.provenance)}); plan again"
            )
        _check_choice(selection, sharding.solution.choice, stage)
        selections.append(selection)
    tasks = build_tasks(program, staging)
    return Planned(plan, program, staging, tuple(selections), tasks)


def _check_choice(selection: Selection, choice: tuple[int, ...] | None, stage: int) -> None:
    """Raise PlanError unless `choice` names a strategy for every node of the stage's problem."""
    counts = selection.problem.num_strategies
    held = -1 if choice is None else len(choice)
    if held != len(counts):
        raise PlanError(
            f"the choice of stage {stage} of the plan must name a strategy for each of "
            f"{len(counts)} nodes, but names {max(held, 0)}; the plan is damaged, plan again"
        )
    for node, (number, count) in enumerate(zip(choice or (), counts, strict=True)):
        if not 0 <= number < count:
            raise PlanError(
                f"the choice of stage {stage} of the plan names strategy {number} for node {node}, "
                f"which has {count}; the plan is damaged, plan again"
            )


def check_program(plan: ParallelPlan, program: Program, step: Step) -> None:
    """Raise PlanError with a readable diff unless `plan` was made for `program`."""
    ours = {leaf.path: (tuple(leaf.aval.shape), str(leaf.aval.dtype)) for leaf in program.inputs}
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        if leaf.role == "batch":
            shape = (step.batch_size, *var.aval.shape[1:])
            ours[leaf.path] = (shape, str(leaf.aval.dtype))
    theirs = {item.path: (item.shape, item.dtype) for item in plan.program.inputs}
    lines = []
    for path in sorted(set(ours) | set(theirs)):
        here, there = ours.get(path), theirs.get(path)
        if here != there:
            lines.append(f"  {path}: plan {_typed(there)}, program {_typed(here)}")
    if lines:
        more = f"\n  ... and {len(lines) - 12} more" if len(lines) > 12 else ""
        raise PlanError(
            "the plan was made for another program; inputs differ:\n"
            + "\n".join(lines[:12])
            + more
            + "\nplan this program, or load the plan that was made for it"
        )
    if plan.program.fingerprint != fingerprint(program):
        raise PlanError(
            "the plan was made for another program: the inputs agree, but the operations differ "
            f"({plan.program.num_ops} in the plan, {len(program.jaxpr.eqns)} in the program); "
            "plan this program again"
        )


def _typed(value: tuple[tuple[int, ...], str] | None) -> str:
    if value is None:
        return "has none"
    shape, dtype = value
    return f"{dtype}[{','.join(map(str, shape))}]"


def fingerprint(program: Program) -> str:
    """Return a hash of the program's operations and types."""
    digest = hashlib.sha256()
    for eqn in program.jaxpr.eqns:
        types = [str(getattr(atom, "aval", atom)) for atom in (*eqn.invars, *eqn.outvars)]
        digest.update(f"{eqn.primitive.name} {types}\n".encode())
    return digest.hexdigest()


def problem_hash(selection: Selection) -> str:
    """Return a hash of a selection problem's nodes and strategies."""
    digest = hashlib.sha256()
    for name, strategies in zip(
        selection.problem.node_names, selection.problem.strategy_names, strict=True
    ):
        digest.update(f"{name}: {' | '.join(strategies)}\n".encode())
    return digest.hexdigest()


# ---------------------------------------------------------------------- search


def _counts(step: Step, options: Options) -> list[int]:
    batch = step.batch_size
    counts = microbatch_counts(batch, options.num_stages, options.num_microbatches)
    if not options.exact:
        return counts
    inexact = {count: _inexact_with(step, count) for count in counts if count > 1}
    given = options.num_microbatches
    if given is not None and inexact.get(given):
        raise PlanError(
            f"{given} microbatches would change the result: {inexact[given][0]}; use "
            "num_microbatches=1, or Options(exact=False) to accept it"
        )
    return [count for count in counts if not inexact.get(count)] or [1]


def _inexact_with(step: Step, count: int) -> tuple[str, ...]:
    """Return why `count` microbatches would change the result; a step may be written for one size."""
    try:
        return step.program(count).inexact
    except PlanError:
        raise
    except (TypeError, ValueError) as error:
        return (f"the step only takes batches of {step.batch_size} ({error})",)


def _memory(cluster: ClusterSpec, host_group: int, options: Options) -> float:
    return options.memory or memory_per_device(cluster, host_group)


def outlook_of(
    program: Program, options: Options, num_layers: int | None = None
) -> tuple[Outlook, Layering]:
    """Return the program in layers, and as one stage."""
    wanted = num_layers or options.num_layers
    if wanted is None and options.num_stages and options.num_stages > 1:
        wanted = _at_least(program, options.num_stages)

    def cluster(eqns: Any, inputs: Any) -> Any:
        return stage_dp.cluster_layers(_sequence(eqns), wanted).layer_of_op

    layering = assign_layers(program, cluster)
    staging = assign_stages(layering, [], program.jaxpr.outvars)
    return Outlook(program, staging, layering.num_layers), layering


def _at_least(program: Program, num_stages: int) -> int | None:
    """Return a number of layers if fewer than `num_stages` would be chosen, else None."""
    forward = [
        eqn
        for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True)
        if phase == "forward"
    ]
    chosen = stage_dp.cluster_layers(_sequence(forward)).num_layers
    return None if chosen >= num_stages else num_stages


def _sequence(eqns: Any) -> stage_dp.OpSequence:
    number: dict[Any, int] = {}

    def of(var: Any) -> int:
        return number.setdefault(var, len(number))

    operands = [[of(a) for a in eqn.invars if not isinstance(a, Literal)] for eqn in eqns]
    results = [[of(var) for var in eqn.outvars] for eqn in eqns]
    return stage_dp.OpSequence(
        flops=[float(flops(eqn)) for eqn in eqns],
        operands=operands,
        results=results,
        value_bytes={place: tensor_bytes(var) for var, place in number.items()},
        signatures=[eqn_signature(eqn) for eqn in eqns],
    )


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
            if submesh.num_devices > cluster.num_devices - options.num_stages + 1:
                continue
        elif options.num_stages is None and single and not whole and cluster.num_devices > 1:
            continue  # pipelines are planned with more microbatches
        most = max(options.max_mesh_axes, len(options.mesh_shape or ()))
        ordered = bool(options.pins or options.preset or options.mesh_shape)
        for mesh in logical_meshes(model, submesh, most, options.axis_names, ordered):
            if options.mesh_shape in (None, mesh.shape):
                found.append((submesh, mesh, whole))
    if not found:
        raise PlanError(
            f"no logical mesh is left to plan for: num_stages={options.num_stages}, "
            f"mesh_shape={options.mesh_shape}, {cluster.num_devices} devices in {cluster.name!r}"
        )
    return found


def device_groups(cluster: ClusterSpec, options: Options) -> tuple[DeviceGroup, ...]:
    """Return the hosts that stages are cut from, with the memory that plans may use."""
    return tuple(
        DeviceGroup(
            num_hosts=group.num_hosts,
            devices_per_host=group.devices_per_host,
            memory=_memory(cluster, number, options),
        )
        for number, group in enumerate(cluster.host_groups)
    )


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
        device_groups=device_groups(cluster, options),
        candidates=tuple(range_candidates(outlook, solutions, model)),
        schedules=(options.schedule,),
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
    missing: list[float],
    step: Step,
    cluster: ClusterSpec,
    model: CostModel,
    options: Options,
) -> Planned:
    chosen: list[tuple[float, StagePlan, _Search]] = []
    remedies: list[str] = []
    for search in searches:
        try:
            plan = stage_dp.solve_stages(search.problem)
        except stage_dp.InfeasibleError as error:
            missing.append(error.missing_bytes)
            remedies.append(str(error))
            continue
        chosen.append((plan.step_seconds, plan, search))
    chosen.sort(key=lambda item: item[0])
    bound = min((search.bound for search in searches), default=0.0)
    while chosen:
        _, plan, search = chosen.pop(0)

        def choose(
            candidate: StageCandidate, selection: Selection, memory: float, search: _Search = search
        ) -> ShardingSolution:
            known = _whole(candidate, search.solutions)
            return known.solution if known else solve(selection, options, memory)

        outlook, layering = search.outlook, search.layering
        planned = finish(
            plan, outlook, layering, bound, step, model, options, choose, search.solutions
        )
        if isinstance(planned, Planned):
            return planned
        missing.append(planned)
        rest = _without(search.problem, plan)
        if rest is not None:
            try:
                again = stage_dp.solve_stages(rest)
            except stage_dp.InfeasibleError as error:
                missing.append(error.missing_bytes)
            else:
                chosen.append((again.step_seconds, again, evolve(search, problem=rest)))
                chosen.sort(key=lambda item: item[0])
    raise _infeasible(missing, remedies, cluster, options)


def _without(problem: StageProblem, plan: StagePlan) -> StageProblem | None:
    """Return the problem without the candidates of a plan that turned out not to fit."""
    used = {stage.candidate for stage in plan.stages}
    left = tuple(c for c in problem.candidates if c not in used)
    return evolve(problem, candidates=left) if left else None


def _infeasible(
    missing: list[float], remedies: list[str], cluster: ClusterSpec, options: Options
) -> InfeasibleError:
    least = min((bytes for bytes in missing if bytes > 0), default=0.0)
    limit = _memory(cluster, 0, options)
    if options.num_microbatches is None or options.num_microbatches == 1:
        remedy = "cut the batch into more microbatches (num_microbatches)"
    else:
        remedy = "recompute activations (jax.checkpoint) or use a smaller batch"
    detail = f" ({remedies[0]})" if remedies and not least else ""
    return InfeasibleError(
        f"no plan fits the memory: each device has {limit:,.0f} bytes for the program and lacks at "
        f"least {math.ceil(least):,} more on cluster {cluster.name!r}; cheapest remedy: {remedy}, or "
        f"use more devices{detail}",
        least,
    )


# ---------------------------------------------------------------------- the chosen plan


def _stage_selection(
    program: Program,
    staging: Staging,
    stage: int,
    candidate: StageCandidate,
    in_flight: int,
    model: CostModel,
    options: Options,
) -> tuple[Any, Selection]:
    pins = input_pins(program, candidate.logical, options)
    scope = stage_scope(program, staging, stage, in_flight, pins)
    costs = MeshCosts(candidate.logical, model, candidate.submesh.host_group)
    return scope, build(scope.eqns, costs, f"stage {stage}")


def finish(
    stage_plan: StagePlan,
    outlook: Outlook,
    layering: Layering,
    bound: float,
    step: Step,
    model: CostModel,
    options: Options,
    choose: Choose,
    solutions: Sequence[MeshSolution] = (),
) -> Planned | float:
    """Return the plan with every stage solved exactly, or the bytes missing if one does not fit.

    `choose` answers each stage's selection problem under a memory limit in bytes (`Choose`). A
    single stage's problem is taken from `solutions` where it was built already.
    """
    cluster = model.cluster
    cuts = [stage.candidate.layer_start for stage in stage_plan.stages[1:]]
    staging = outlook.staging
    if cuts:
        staging = assign_stages(layering, cuts, outlook.program.jaxpr.outvars)
    selections, shardings, stages, peaks = [], [], [], []
    solved: dict[str, ShardingSolution] = {}
    for stage, placed in enumerate(stage_plan.stages):
        options.progress("stages", stage, len(stage_plan.stages))
        in_flight = stage_plan.in_flight[stage]
        built = None if cuts else _whole(placed.candidate, solutions)
        if built is not None and built.scope is not None and built.selection is not None:
            scope, selection = built.scope, built.selection
        else:
            scope, selection = _stage_selection(
                outlook.program, staging, stage, placed.candidate, in_flight, model, options
            )
        limit = _memory(cluster, placed.candidate.submesh.host_group, options)
        room = limit - placed.candidate.transient_bytes
        key = problem_hash(selection) + repr(selection.problem.node_cost.sum())
        if key not in solved:
            solved[key] = choose(placed.candidate, selection, max(room, 1.0))
        solution = solved[key]
        if solution.choice is None:
            return max((solution.smallest_memory or room * 1.1) - room, 1.0)
        candidate, costs = exact_candidate(
            scope, selection, solution, placed.candidate, outlook.num_layers
        )
        selections.append(selection)
        memory = _memory_by_name(costs, in_flight)
        shardings.append(_sharding(outlook.program, placed, selection, solution, memory))
        stages.append(PlacedStage(candidate=candidate, device_ids=placed.device_ids))
        peaks.append(sum(memory.values()))
    options.progress("stages", len(stages), len(stages))
    seconds = stage_dp.step_seconds([stage.candidate for stage in stages], stage_plan.schedule)
    exact = evolve(
        stage_plan,
        stages=tuple(stages),
        step_seconds=seconds,
        lower_bound=min(bound, seconds),
        peak_bytes=tuple(peaks),
    )
    tasks = build_tasks(outlook.program, staging)
    schedule = stage_dp.emit(
        tasks.graph,
        stage_plan.schedule,
        stage_plan.num_microbatches,
        warmups=stage_plan.in_flight if stage_plan.schedule == "adaptive" else None,
    )
    plan = ParallelPlan(
        program=_summary(outlook.program, step),
        cluster=cluster,
        layers=_layers(outlook, layering),
        stage_plan=exact,
        shardings=tuple(shardings),
        schedule=schedule,
        step_seconds=seconds,
        lower_bound=min(bound, seconds),
        provenance=_provenance(),
    )
    return Planned(plan, outlook.program, staging, tuple(selections), tasks)


def _whole(candidate: StageCandidate, solutions: Sequence[MeshSolution]) -> MeshSolution | None:
    """Return the solution of the whole program on the whole cluster that `candidate` stands for."""
    return next(
        (found for found in solutions if found.whole and found.mesh == candidate.logical), None
    )


def _memory_by_name(costs: StageCosts, in_flight: int) -> dict[str, float]:
    return {
        "state": float(costs.state.sum()),
        "gradients": float(costs.gradients.sum()),
        "activations": float(costs.activations.sum() * in_flight),
        "temporaries": float(costs.transient.max()),
    }


def _sharding(
    program: Program,
    placed: PlacedStage,
    selection: Selection,
    solution: ShardingSolution,
    memory: dict[str, float],
) -> StageSharding:
    choice = solution.choice
    assert choice is not None
    state = {
        leaf.path: selection.spec(var, choice)
        for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True)
        if var in selection.sources
    }
    activations = {}
    replicated: dict[str, None] = {}
    for eqn, phase in zip(selection.stage.eqns, selection.stage.phases, strict=True):
        name = eqn.primitive.name
        if phase == "forward" and name in ("dot_general", "conv_general_dilated", "scan"):
            activations[_label(eqn)] = selection.spec(eqn.outvars[0], choice)
        if sharding_rule(eqn) is None and name not in ("scan", "while", "cond"):
            if any(getattr(var.aval, "shape", ()) for var in eqn.outvars):
                replicated[name] = None
    return StageSharding(
        mesh=DeviceMesh(
            submesh=placed.candidate.submesh,
            logical=placed.candidate.logical,
            device_ids=placed.device_ids,
        ),
        solution=solution,
        problem_hash=problem_hash(selection),
        state_specs=state,
        activation_specs=activations,
        memory=memory,
        replicated_ops=tuple(replicated),
    )


def _label(eqn: Any) -> str:
    scope = name_stack(eqn).replace("jvp(", "").replace("transpose(", "").replace(")", "")
    shape = ",".join(map(str, eqn.outvars[0].aval.shape))
    return f"{scope or 'step'} {eqn.primitive.name}[{shape}]"


def _summary(program: Program, step: Step) -> ProgramSummary:
    inputs = []
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        shape = tuple(var.aval.shape)
        if leaf.role == "batch":
            shape = (step.batch_size, *shape[1:])
        inputs.append(
            InputSummary(path=leaf.path, shape=shape, dtype=str(leaf.aval.dtype), role=leaf.role)
        )
    return ProgramSummary(
        fingerprint=fingerprint(program),
        inputs=tuple(inputs),
        num_ops=len(program.jaxpr.eqns),
        batch_size=step.batch_size,
        phases_from=program.phases.recognised_by,
    )


def _layers(outlook: Outlook, layering: Layering) -> tuple[Layer, ...]:
    count = outlook.num_layers
    work = np.zeros((count, 2))
    for eqn, phase, layer in zip(layering.eqns, layering.phases, layering.layers, strict=True):
        if layer is not None and phase != "update":
            work[layer, phase == "backward"] += flops(eqn)
    keys = fold_keys(layering.eqns, layering.phases, layering.layers)
    classes = layer_classes(keys, layering.layers, count)
    parameters = np.zeros(count)
    for var, leaf, readers in zip(
        outlook.program.jaxpr.invars, outlook.program.inputs, layering.input_layers, strict=True
    ):
        if leaf.role == "state" and readers:
            parameters[min(readers)] += tensor_bytes(var)
    crossing = boundary_bytes(outlook.program, outlook.staging, count)
    return tuple(
        Layer(
            index=k,
            equivalence_class=classes[k],
            forward_flops=float(work[k, 0]),
            backward_flops=float(work[k, 1]),
            parameter_bytes=float(parameters[k]),
            boundary_bytes=float(crossing[k]),
        )
        for k in range(count)
    )


def _provenance() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "source"
    versions["jax"] = jax.__version__
    return versions
