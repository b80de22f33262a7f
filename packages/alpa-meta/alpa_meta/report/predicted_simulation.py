"""The schedule of a plan, simulated with the times that the plan predicts.

The simulated step is the plan's own step time where stages read from their neighbours only: both
are the longest path through one schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from attrs import evolve

from alpa_interchange import Instruction, ParallelPlan, PipelineSchedule, TaskGraph
from alpa_meta.errors import PlanError
from cost_model import Simulation, simulate
from stage_dp import instruction_lists


def predicted_simulation(plan: ParallelPlan) -> Simulation:
    """Return the simulated step of `plan`; PlanError where its tasks cannot be put in order."""
    if plan.tasks is not None:
        plan = evolve(plan, tasks=_without_alike(plan.tasks))
    try:
        schedule = instruction_lists(plan)
    except ValueError as error:
        raise PlanError(f"the plan's tasks make no schedule: {error}") from None
    transfers = _transfer_seconds(plan, schedule)
    return simulate(
        schedule,
        _task_seconds(plan, schedule),
        lambda source, target, value: transfers.get((source, target, value), 0.0),
    )


def _without_alike(graph: TaskGraph) -> TaskGraph:
    """Return tasks with one of all values that the same tasks read and write and that stay on their
    mesh: runs and transfers come in the same order. A GPT has hundreds for each that matters.
    """
    uses: dict[str, list[tuple[int, str]]] = {}
    meshes: dict[str, set[int]] = {}
    for value, mesh in zip(graph.inputs, graph.home, strict=True):
        meshes[value] = {mesh}
    for number, task in enumerate(graph.tasks):
        for kind in ("inputs", "outputs", "donated"):
            for value in getattr(task, kind):
                uses.setdefault(value, []).append((number, kind))
                meshes.setdefault(value, set()).add(task.mesh)
    per_step, given, wanted = set(graph.per_step), set(graph.inputs), set(graph.outputs)
    first: dict[Hashable, str] = {}
    for value in meshes:
        facts = (value in per_step, value in given, value in wanted, *uses.get(value, ()))
        alone = len(meshes[value]) == 1
        first.setdefault((*sorted(meshes[value]), facts) if alone else value, value)
    kept = set(first.values())

    def some(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(value for value in values if value in kept)

    held = [(v, mesh) for v, mesh in zip(graph.inputs, graph.home, strict=True) if v in kept]
    return TaskGraph(
        tasks=tuple(
            evolve(
                task,
                inputs=some(task.inputs),
                outputs=some(task.outputs),
                donated=some(task.donated),
            )
            for task in graph.tasks
        ),
        per_step=some(graph.per_step),
        inputs=tuple(value for value, _ in held),
        home=tuple(mesh for _, mesh in held),
        outputs=some(graph.outputs),
    )


def _transfer_seconds(
    plan: ParallelPlan, schedule: PipelineSchedule
) -> dict[tuple[int, int, str], float]:
    """Return the seconds of each value that one stage sends another, by source, target and name.

    What a stage sends to the next one, and back to the one before, takes the seconds of the
    boundary between them, in equal parts; of a token slice, its share of them. What the next run
    there does not read costs nothing on its way: the plan counts it at every boundary that it
    crosses. Inputs of the step and values of the update cost nothing here: the update's share is
    part of the stage's seconds per step.
    """
    num_meshes = len(schedule.programs)
    read: dict[tuple[int, str], set[str]] = {}  # by stage and phase
    for task in plan.tasks.tasks if plan.tasks is not None else ():
        read.setdefault((task.stage, task.phase), set()).update(task.inputs)
    boundary_of: dict[tuple[int, int, str], tuple[int, str, int]] = {}
    for mesh, program in enumerate(schedule.programs):
        for instruction in program:
            boundary = _boundary(instruction, mesh, num_meshes)
            if boundary is None or instruction.peer is None:
                continue
            # of the stages beside the boundary, the one that it does not come from
            following = 2 * boundary + 1 - instruction.stage
            if instruction.peer != following % num_meshes:
                continue
            wanted = read.get((following, instruction.phase))
            for name in instruction.inputs:
                value = name.partition("@")[0]
                if wanted is None or value in wanted:
                    boundary_of[mesh, instruction.peer, value] = (
                        boundary,
                        instruction.phase,
                        instruction.slice_index,
                    )
    parts = Counter(boundary_of.values())

    def seconds(boundary: int, slice_index: int) -> float:
        candidate = plan.stage_plan.stages[boundary].candidate
        slices = candidate.token_slices
        share = slices[slice_index].tokens / sum(one.tokens for one in slices) if slices else 1.0
        return candidate.boundary_seconds * share

    return {
        key: seconds(boundary, slice_index) / parts[boundary, phase, slice_index]
        for key, (boundary, phase, slice_index) in boundary_of.items()
    }


def _boundary(instruction: Instruction, mesh: int, num_meshes: int) -> int | None:
    """Return which boundary a send crosses first: k is between stages k and k + 1."""
    stage = instruction.stage
    if instruction.kind != "send" or instruction.microbatch is None or stage % num_meshes != mesh:
        return None
    if instruction.phase == "forward":
        return stage
    return stage - 1 if instruction.phase in ("backward", "backward_input") and stage else None


def _task_seconds(plan: ParallelPlan, schedule: PipelineSchedule) -> dict[str, float]:
    """Return the predicted seconds of one run of each task.

    Where a stage has no task of its own for a phase, another task does that work. Of an update in
    several tasks, between which a scalar of all stages is known (the norm of all gradients), the
    first takes the seconds: plans do not count that stages wait for each other there.
    """
    # names in the order in which they run, by stage and token slice, then by phase
    tasks: dict[tuple[int, int], dict[str, dict[str, None]]] = {}
    for program in schedule.programs:
        for instruction in program:
            if instruction.kind == "run":
                phases = tasks.setdefault((instruction.stage, instruction.slice_index), {})
                phases.setdefault(instruction.phase, {})[instruction.task] = None
    seconds: dict[str, float] = {}
    for (stage, slice_index), phases in tasks.items():
        candidate = plan.stage_plan.stages[stage].candidate
        slices = candidate.token_slices
        unit = slices[slice_index] if slices else candidate
        by_weight = unit.backward_weight_seconds
        per_phase = {
            "start": 0.0,
            "statistics": candidate.forward_seconds,
            "forward": unit.forward_seconds,
            "backward": unit.backward_seconds,
            "backward_input": unit.backward_seconds - by_weight,
            "backward_weight": by_weight,
            "update": candidate.step_seconds,
        }
        if "backward_input" not in phases:
            per_phase["backward_weight"] += per_phase.pop("backward_input")
        if "forward" not in phases:
            per_phase["backward"] += per_phase.pop("forward")
        if "update" not in phases and slice_index == 0:  # the last whose backward runs
            per_phase["backward"] += per_phase.pop("update")
        for phase, names in phases.items():
            working = list(names)[:1] if phase == "update" else list(names)
            share = per_phase.get(phase, 0.0) / len(working)
            seconds |= {name: share if name in working else 0.0 for name in names}
    return seconds
