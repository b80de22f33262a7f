"""The bytes that devices need with all stages (chunks) that they run.

A mesh whose chunks last l_c bytes with k_c microbatches in flight, of a_c bytes each, and have
temporaries of t_c bytes, of which only those of the chunk that runs are there, needs

    max over moments of sum_c (l_c + (m_c - k_c) a_c) + max_c t_c

where m_c are the microbatches of each chunk that are alive together (`InterleavedOrder.alive`).
-> device_bytes(), bytes_together()
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from alpa_interchange.menu import JointPlan, JointStage
from alpa_interchange.stage import PlacedStage, StageCandidate, StagePlan
from stage_dp.interleaved_order import Index, holding_order
from stage_dp.schedules import SCHEDULE_RULES


@frozen
class Chunk:
    """What a stage holds per device: `lasting` bytes with `in_flight` microbatches alive, of
    `activation` bytes each, and `transient` bytes while it runs."""

    lasting: float
    in_flight: int
    activation: float
    transient: float


def bytes_together(chunks: Sequence[Chunk], alive: Index) -> float:
    """Return the bytes per device of a mesh with these chunks, `alive` [moments, chunks]; chunks
    beyond these count nothing."""
    return fullest(chunks, alive)[0]


def fullest(chunks: Sequence[Chunk], alive: Index) -> tuple[float, tuple[int, ...]]:
    """Return the bytes of a mesh and the microbatches of each chunk that are alive when it needs
    them."""
    more = alive[:, : len(chunks)] - np.array([c.in_flight for c in chunks])
    held = more @ np.array([c.activation for c in chunks])
    lasting = sum(c.lasting for c in chunks)
    at = int(held.argmax())
    needed = lasting + float(held[at]) + max(c.transient for c in chunks)
    return needed, tuple(alive[at].tolist())


def alive_together(plan: StagePlan | JointPlan) -> tuple[Index, ...]:
    """Return the microbatches that are alive together of the stages of each mesh: [moments, stages]
    by mesh, one moment where the schedule has none of its own."""
    num, meshes = len(plan.stages), plan.num_meshes
    if not SCHEDULE_RULES[plan.schedule].interleaves:
        held = np.array(plan.in_flight or (1,) * num)
        return tuple(held[None, mesh::meshes] for mesh in range(meshes))
    return holding_order(meshes, num // meshes, plan.num_microbatches).alive


def chunks_of(plan: StagePlan | JointPlan) -> list[Chunk]:
    """Return what each stage of a plan holds, by its peak."""
    found = []
    alive = plan.in_flight or (1,) * len(plan.stages)
    stages: Sequence[PlacedStage | JointStage] = plan.stages
    for stage, peak, held in zip(stages, plan.peak_bytes, alive, strict=True):
        figures = _figures(stage)
        transient = figures.transient_bytes
        found.append(Chunk(peak - transient, held, figures.activation_bytes, transient))
    return found


def _figures(stage: PlacedStage | JointStage) -> StageCandidate | JointStage:
    return stage.candidate if isinstance(stage, PlacedStage) else stage


def device_bytes(plan: StagePlan | JointPlan) -> tuple[float, ...]:
    """Return, per stage, the bytes that each of its devices needs with all stages that it runs:
    more than the stage's peak where there are several; none where the peaks are not known."""
    meshes = plan.num_meshes
    if not plan.peak_bytes or meshes == len(plan.stages):
        return plan.peak_bytes
    chunks, alive = chunks_of(plan), alive_together(plan)
    held = [bytes_together(chunks[mesh::meshes], alive[mesh]) for mesh in range(meshes)]
    return tuple(held[stage % meshes] for stage in range(len(chunks)))


def with_device_bytes(plan: StagePlan) -> StagePlan:
    """Return the plan with the bytes of its devices, where these run several stages."""
    several = plan.num_meshes < len(plan.stages)
    return evolve(plan, device_bytes=device_bytes(plan) if several else ())
