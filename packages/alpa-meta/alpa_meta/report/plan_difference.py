"""What differs between two plans of one program, and what each of them spends its time on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import fields, frozen

from alpa_interchange import LogicalMesh, ParallelPlan, ShardingSpec
from alpa_interchange.amounts import counted
from alpa_interchange.plan_text import mesh_text, number_text
from alpa_meta.errors import PlanError
from alpa_meta.report.predicted_simulation import predicted_simulation

_PIECE = re.compile(r"^(.*)\[(\d+):(\d+)\]$")


@frozen(kw_only=True)
class TimeSplit:
    """Seconds per step of a mesh, or the mean over a plan's; they add up to the simulated step.

    `update` is without its collectives, which are among `collectives`; `transfers` is waiting for
    values of other stages, `bubble` waiting for a turn.
    """

    compute: float
    collectives: float
    update: float
    transfers: float
    bubble: float


@frozen(kw_only=True)
class PlanCosts:
    """What one plan is predicted to cost; `time` is None where its document does not say."""

    step_seconds: float
    lower_bound: float
    time: TimeSplit | None
    device_bytes: tuple[float, ...]  # per mesh


@frozen(kw_only=True)
class Difference:
    """A decision that two plans took differently, in words; `what` is a path for tensors."""

    what: str
    first: str
    second: str


@frozen(kw_only=True)
class PlanDifference:
    """Two plans beside one another; `decisions` and `shardings` that are equal are left out.

    Recomputation of other layers than the other's (a stage that is not cut) is compared as a whole.
    """

    costs: tuple[PlanCosts, PlanCosts]
    decisions: tuple[Difference, ...]
    shardings: tuple[Difference, ...]  # of parameters and optimiser state


def plan_difference(first: ParallelPlan, second: ParallelPlan) -> PlanDifference:
    """Return what differs between two plans; PlanError unless they are of the same program."""
    _check_same_program(first, second)
    return PlanDifference(
        costs=(plan_costs(first), plan_costs(second)),
        decisions=tuple(_decisions(first, second)),
        shardings=tuple(_shardings(first, second)),
    )


def plan_costs(plan: ParallelPlan) -> PlanCosts:
    """Return what a plan is predicted to cost, and what it spends its step on."""
    return PlanCosts(
        step_seconds=plan.step_seconds,
        lower_bound=plan.lower_bound,
        time=time_split(plan),
        device_bytes=plan.device_bytes[: plan.stage_plan.num_meshes],
    )


def time_split(plan: ParallelPlan) -> TimeSplit | None:
    """Return what the meshes spend a step on, their mean; None where the collectives are not
    known."""
    found = time_splits(plan)
    if found is None:
        return None
    names = [field.name for field in fields(TimeSplit)]
    return TimeSplit(**{name: sum(getattr(o, name) for o in found) / len(found) for name in names})


def time_splits(plan: ParallelPlan) -> tuple[TimeSplit, ...] | None:
    """Return what each mesh spends a step on; None where the collectives are not known."""
    if any(sharding.collective_seconds is None for sharding in plan.shardings):
        return None
    simulation = predicted_simulation(plan)
    meshes = len(simulation.busy_seconds)
    once, collectives, of_update = ([0.0] * meshes for _ in range(3))
    stages = zip(plan.stage_plan.stages, plan.shardings, strict=True)
    for number, (stage, sharding) in enumerate(stages):
        mesh, sent = number % meshes, sharding.collective_seconds or {}
        once[mesh] += stage.candidate.step_seconds
        collectives[mesh] += sum(sent.values())
        of_update[mesh] += sent.get("update", 0.0)
    found = []
    for mesh in range(meshes):
        update = max(once[mesh] - of_update[mesh], 0.0)
        transfers = simulation.exposed_seconds[mesh]
        found.append(
            TimeSplit(
                compute=simulation.busy_seconds[mesh] - update - collectives[mesh],
                collectives=collectives[mesh],
                update=update,
                transfers=transfers,
                bubble=simulation.bubble_seconds[mesh] - transfers,
            )
        )
    return tuple(found)


def _check_same_program(first: ParallelPlan, second: ParallelPlan) -> None:
    one, other = first.program, second.program
    if one.fingerprint == other.fingerprint:
        return
    before = {entry.path: (entry.shape, entry.dtype) for entry in one.inputs}
    after = {entry.path: (entry.shape, entry.dtype) for entry in other.inputs}
    found = next((path for path in before if after.get(path) != before[path]), None)
    found = found or next((path for path in after if path not in before), None)
    where = "their operations differ"
    if found is not None:
        where = f"the first that differs is {found}: {before.get(found)} and {after.get(found)}"
    raise PlanError(
        "two plans are compared of one program, but these are of programs "
        f"{one.fingerprint[:12]} and {other.fingerprint[:12]}: {where}; plan the same step, state "
        "and batch twice"
    )


def _decisions(first: ParallelPlan, second: ParallelPlan) -> Iterator[Difference]:
    """Yield what the plans decided differently."""
    for what, of in (
        ("cluster", _cluster),
        ("schedule", lambda plan: plan.stage_plan.schedule),
        ("microbatches", lambda plan: str(plan.num_microbatches)),
        ("stages", lambda plan: str(plan.num_stages)),
        ("recomputation", recomputed_layers),
    ):
        if of(first) != of(second):
            yield Difference(what=what, first=of(first), second=of(second))
    for stage in range(max(first.num_stages, second.num_stages)):
        for what, of_stage in (("layers", _layers), ("devices", _devices), ("mesh", _mesh)):
            one, other = (
                of_stage(plan, stage) if stage < plan.num_stages else "no such stage"
                for plan in (first, second)
            )
            if one != other:
                yield Difference(what=f"stage {stage}: {what}", first=one, second=other)


def _cluster(plan: ParallelPlan) -> str:
    return f"{plan.cluster.name}, {counted(plan.cluster.num_devices, 'device')}"


def recomputed_layers(plan: ParallelPlan) -> str:
    """Return which layers of a plan are recomputed how."""
    kinds = {layer.recomputation for layer in plan.layers}
    if len(kinds) == 1:
        return kinds.pop() + " in all layers"
    return ", ".join(
        f"{kind} in {number_text(k.index for k in plan.layers if k.recomputation == kind)}"
        for kind in sorted(kinds - {"none"})
    )


def _layers(plan: ParallelPlan, stage: int) -> str:
    one = plan.stage_plan.stages[stage].candidate
    if plan.num_stages == 1:
        return "all"
    return number_text(range(one.layer_start, one.layer_stop))


def _devices(plan: ParallelPlan, stage: int) -> str:
    return number_text(plan.shardings[stage].mesh.device_ids)


def _mesh(plan: ParallelPlan, stage: int) -> str:
    return mesh_text(plan.shardings[stage].mesh.logical)


def _shardings(first: ParallelPlan, second: ParallelPlan) -> Iterator[Difference]:
    """Yield the state that lies differently on its stage's mesh."""
    before, after = state_specs(first), state_specs(second)
    for path in sorted(before.keys() | after.keys()):
        one, other = (specs.get(path, "on no device") for specs in (before, after))
        if one != other:
            yield Difference(what=path, first=one, second=other)


def state_specs(plan: ParallelPlan) -> dict[str, str]:
    """Return how each array of the state is held, in words; of one in pieces all its specs."""
    found: dict[str, list[str]] = {}
    for sharding in plan.shardings:
        mesh = sharding.mesh.logical
        for path, spec in sharding.state_specs.items():
            piece = _PIECE.match(path)
            held = _held(spec, mesh)
            kept = found.setdefault(piece[1] if piece else path, [])
            if held not in kept:
                kept.append(held)
    return {path: " and ".join(held) for path, held in sorted(found.items())}


def _held(spec: ShardingSpec, mesh: LogicalMesh) -> str:
    """Return a spec with the number of parts of each dim, which says more than names of axes."""
    parts = [mesh.size(axes) for axes in spec.dims]
    if all(part == 1 for part in parts):
        return "whole"
    return f"{' x '.join(map(str, parts))} parts ({spec})"
