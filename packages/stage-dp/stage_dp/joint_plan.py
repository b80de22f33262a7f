"""The plan document of a chosen pipeline, with its stages placed on devices."""

from __future__ import annotations

from alpa_interchange.menu import JointPlan, JointProblem, JointStage, TriedCount
from stage_dp.joint_chain import Scored
from stage_dp.joint_links import Links
from stage_dp.menu_table import ACTIVATION, BACKWARD, FORWARD, SPLIT, STEP, TRANSIENT, WEIGHT


def plan_of(
    best: Scored,
    problem: JointProblem,
    links: Links,
    lower_bound: float,
    tried: tuple[TriedCount, ...],
) -> JointPlan:
    """Return the plan with its stages placed."""
    num_meshes = best.num_meshes or len(best.stages)
    placed = links.placed([s.mesh for s in best.stages[:num_meshes]]) or ()
    devices = [placed[number % num_meshes] for number in range(len(best.stages))]
    crossing = (*best.crossing, 0.0)
    backward = [BACKWARD, SPLIT] if best.rule.splits_backward else [BACKWARD]
    stages = tuple(
        JointStage(
            layer_start=s.layer_start,
            layer_stop=s.layer_stop,
            mesh=s.mesh,
            rows=s.rows,
            device_ids=ids,
            forward_seconds=float(s.columns[FORWARD]),
            backward_seconds=float(s.columns[backward].sum()),
            weight_seconds=float(s.columns[WEIGHT]),
            step_seconds=float(s.columns[STEP]),
            boundary_seconds=c,
            transient_bytes=float(s.columns[TRANSIENT]),
            activation_bytes=float(s.columns[ACTIVATION]),
        )
        for s, ids, c in zip(best.stages, devices, crossing, strict=True)
    )
    return JointPlan(
        stages=stages,
        num_microbatches=best.num_microbatches,
        schedule=best.rule.name,
        step_seconds=best.step_seconds,
        lower_bound=lower_bound,
        peak_bytes=best.peak_bytes(),
        in_flight=best.in_flight,
        tried=tried,
    )
