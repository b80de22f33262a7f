"""What a saved plan says of itself, held against what its own choices come to.

A plan document says which choices were made and, besides, what follows from them: the tasks, the
bytes and seconds of every stage, the makespan. What follows is computed again when a plan is
restored. Where the versions and profiles that made the plan are those here (`provenance`), the
document must say the same; one that does not was edited or damaged, and nothing else in it can be
trusted. Figures of other versions or profiles are not compared: their model may have been another.
What the search alone knows cannot be computed again: of its bounds only that no plan is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import attrs
from attrs import evolve

import stage_dp
from alpa_interchange import ParallelPlan, PlacedStage, StageSharding
from alpa_meta.errors import PlanError
from alpa_meta.planning.plan_summary import provenance

_ROUNDING = 1e-6
"""By which figures may differ: sums of the same numbers in another order do by some 1e-16."""
_FASTEST = 1e24
"""Of the rates of devices and links: between 1 and this all seconds are finite and none is 0."""
_SEARCHED = ("lower_bound_seconds", "key", "boundary_seconds", "delayed_bytes")
"""Of a stage's candidate, what the search notes and no choice determines."""


def check_consistent(plan: ParallelPlan) -> None:
    """Raise PlanError unless the plan's schedule is a known one, for its stages, and says of each
    the same mesh twice."""
    chosen = plan.stage_plan
    if chosen.schedule not in stage_dp.SCHEDULE_RULES:
        raise PlanError(
            f"the plan's schedule must be one of {', '.join(stage_dp.SCHEDULE_RULES)}, got "
            f"{chosen.schedule!r}; plan again"
        )
    if len(chosen.in_flight) != len(plan.shardings) or min(chosen.in_flight, default=0) < 1:
        raise PlanError(
            "the plan does not say how many microbatches, at least one, each of its "
            f"{len(plan.shardings)} stages has in flight, but {list(chosen.in_flight)}; plan again"
        )
    for group in plan.cluster.host_groups:
        device, links = group.device, (group.intra_host, group.inter_host)
        rates = [device.memory_bandwidth, *device.peak_flops.values()]
        for rate in (*rates, *(link.bandwidth for link in links)):
            if not 1.0 <= rate <= _FASTEST:
                raise PlanError(
                    f"the plan's cluster has a rate of {rate:g} per second for {device.name!r} or "
                    f"its links, which must be from 1 to {_FASTEST:g}; plan again"
                )
    for stage, (sharding, placed) in enumerate(zip(plan.shardings, chosen.stages, strict=True)):
        mesh, candidate = sharding.mesh, placed.candidate
        said = (mesh.submesh, mesh.logical, mesh.device_ids)
        if said != (candidate.submesh, candidate.logical, placed.device_ids):
            raise PlanError(
                f"the plan was edited or damaged: stage {stage} is on another mesh in `shardings` "
                "than in `stage_plan`; plan again, or take the document as it was saved"
            )
        if candidate.num_microbatches != plan.num_microbatches:
            raise PlanError(
                f"the plan was edited or damaged: stage {stage} is for "
                f"{candidate.num_microbatches} microbatches, the plan for {plan.num_microbatches}; "
                "plan again, or take the document as it was saved"
            )


def with_claims(
    plan: ParallelPlan, shardings: Sequence[StageSharding], stages: Sequence[PlacedStage]
) -> ParallelPlan:
    """Return `plan` with stages computed again and what follows from them."""
    old = plan.stage_plan
    chain = [stage.candidate for stage in stages]
    seconds = stage_dp.step_seconds(chain, old.schedule, old.in_flight, num_meshes=old.num_meshes)
    peaks = tuple(one.peak_bytes for one in shardings)
    bound = min(plan.lower_bound, seconds)
    stage_plan = stage_dp.with_device_bytes(
        evolve(
            old,
            stages=tuple(stages),
            step_seconds=seconds,
            lower_bound=min(old.lower_bound, seconds),
            peak_bytes=peaks,
        )
    )
    return evolve(
        plan,
        stage_plan=stage_plan,
        shardings=tuple(shardings),
        step_seconds=seconds,
        lower_bound=bound,
    )


def check_claims(plan: ParallelPlan, rebuilt: ParallelPlan) -> None:
    """Raise PlanError if the plan says something else than `rebuilt`, which was made of its
    choices here."""
    if dict(plan.provenance) != provenance():
        return
    found = _difference(_claims(plan), _claims(rebuilt), "")
    if found is None:
        return
    where, said, true = found
    raise PlanError(
        f"the plan was edited or damaged: it says {where.lstrip('.')} = {_short(said)}, but its "
        f"choices come to {_short(true)}; plan again, or take the document as it was saved"
    )


def _claims(plan: ParallelPlan) -> dict[str, object]:
    """Return what follows from the choices of a plan, by its place in the document."""
    return {
        "program": evolve(plan.program, uncut=""),
        "tasks": plan.tasks,
        "layers": plan.layers,
        "step_seconds": plan.step_seconds,
        "lower_bound": plan.lower_bound,
        "stage_plan": {
            "step_seconds": plan.stage_plan.step_seconds,
            "lower_bound": plan.stage_plan.lower_bound,
            "peak_bytes": plan.stage_plan.peak_bytes,
            "device_bytes": plan.stage_plan.device_bytes,
            "stages": [_of_candidate(stage) for stage in plan.stage_plan.stages],
        },
        "shardings": [_of_stage(one) for one in plan.shardings],
    }


def _of_candidate(stage: PlacedStage) -> dict[str, object]:
    names = [one.name for one in attrs.fields(type(stage.candidate)) if one.name not in _SEARCHED]
    return {"candidate": {name: getattr(stage.candidate, name) for name in names}}


def _of_stage(sharding: StageSharding) -> dict[str, object]:
    return {
        "mesh": sharding.mesh,
        "memory": sharding.memory,
        "communication": sharding.communication,
        "collective_seconds": sharding.collective_seconds,
        "activation_specs": sharding.activation_specs,
        "state_specs": sharding.state_specs,
        "received_specs": sharding.received_specs,
        "replicated_ops": sorted({*sharding.replicated_ops, *sharding.freed_ops}),
        "operators": sorted(name for one in sharding.operators for name in one.names),
    }


def _difference(said: object, true: object, where: str) -> tuple[str, object, object] | None:
    """Return the first place where two values differ, and both there; None if they do not."""
    if said == true:
        return None
    if isinstance(said, float | int) and isinstance(true, float | int):
        return None if math.isclose(said, true, rel_tol=_ROUNDING) else (where, said, true)
    kind = type(said)
    if attrs.has(kind) and kind is type(true):
        names = [one.name for one in attrs.fields(kind)]
        said, true = ({name: getattr(value, name) for name in names} for value in (said, true))
    if isinstance(said, Mapping) and isinstance(true, Mapping):
        for name in sorted({*said, *true}, key=str):
            if name not in said or name not in true:
                return f"{where}.{name}", said.get(name, "nothing"), true.get(name, "nothing")
            found = _difference(said[name], true[name], f"{where}.{name}")
            if found is not None:
                return found
        return None
    if _is_list(said) and _is_list(true):
        if len(said) != len(true):
            return where, said, true
        for k, (one, other) in enumerate(zip(said, true, strict=True)):
            found = _difference(one, other, f"{where}[{k}]")
            if found is not None:
                return found
        return None
    return where, said, true


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
