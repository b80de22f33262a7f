"""Random feasible plans: whatever the plan, the step must compute the same. For tests and audits.

Drawn at random: the number of stages and of microbatches (unless the options say), where the layers
are cut, each stage's submesh and logical mesh, and each node's strategy in the stage's selection
problem (any that the problem does not forbid).
"""

from __future__ import annotations

import math

import numpy as np
from attrs import evolve

import ilp_sharding
import stage_dp
from alpa_interchange import (
    ClusterSpec,
    PlacedStage,
    ShardingSolution,
    StageCandidate,
    StagePlan,
    SubmeshSpec,
)
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.meshes import device_groups, logical_meshes, submeshes
from alpa_meta.intra_op.memory_limit import LEAST_ROUNDS
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned, finish
from alpa_meta.planning.microbatch_counts import check_exact
from alpa_meta.planning.outlooks import outlook_in_pieces, outlook_of
from alpa_meta.step.program import Step
from alpa_meta.user_mesh import with_user_mesh
from cost_model import CostModel


def sample_plan(step: Step, cluster: ClusterSpec, options: Options, seed: int) -> Planned:
    """Return a random plan for `step` on `cluster`; `options` fix what they name."""
    schedule = options.schedule or "1f1b"
    if stage_dp.SCHEDULE_RULES[schedule].interleaves:
        raise PlanError(f"random plans have one stage per mesh; leave out schedule={schedule!r}")
    options = with_user_mesh(step.program(1), cluster, options)
    random = np.random.default_rng(seed)
    model = CostModel(cluster)
    count = options.num_microbatches or int(random.choice(_exact_counts(step)))
    check_exact(step, count, options)
    program = step.program(count)
    found = outlook_in_pieces(program, options, cluster)
    outlook, layering = found or outlook_of(program, options, cluster)
    most = min(outlook.num_layers, cluster.num_devices)
    num_stages = options.num_stages or int(random.integers(1, min(most, 4) + 1))
    if num_stages > most:
        raise PlanError(
            f"{num_stages} stages need as many layers and devices, but the step has "
            f"{outlook.num_layers} layers and the cluster {cluster.num_devices} devices"
        )
    inner = np.arange(1, outlook.num_layers)
    cuts = sorted(int(cut) for cut in random.choice(inner, num_stages - 1, replace=False))
    bounds = [0, *cuts, outlook.num_layers]
    parts = _submeshes(cluster, num_stages, random)
    places = stage_dp.place(device_groups(cluster, options.memory), parts)
    candidates = []
    for start, stop, part in zip(bounds[:-1], bounds[1:], parts, strict=True):
        meshes = logical_meshes(model, part, options.max_mesh_axes, options.axis_names)
        candidates.append(
            StageCandidate(
                layer_start=start,
                layer_stop=stop,
                submesh=part,
                logical=meshes[random.integers(len(meshes))],
                num_microbatches=count,
                forward_seconds=0.0,
                backward_seconds=0.0,
            )
        )
    plan = StagePlan(
        stages=tuple(
            PlacedStage(candidate=candidate, device_ids=devices)
            for candidate, devices in zip(candidates, places, strict=True)
        ),
        num_microbatches=count,
        schedule=schedule,
        step_seconds=0.0,
        lower_bound=0.0,
        peak_bytes=(),
        in_flight=stage_dp.in_flight_counts(candidates, schedule),
    )

    def choose(candidate: StageCandidate, selection: Selection, memory: float) -> ShardingSolution:
        return _random_choice(selection, random)

    planned = finish(plan, outlook, layering, 0.0, step, model, options, choose)
    assert isinstance(planned, Planned)
    return planned


def _exact_counts(step: Step) -> list[int]:
    if step.inexact:
        return [1]
    return [count for count in step.microbatch_counts if not step.program(count).inexact]


def _submeshes(
    cluster: ClusterSpec, num_stages: int, random: np.random.Generator
) -> list[SubmeshSpec]:
    """Return submeshes for the stages that fit on the cluster together."""
    known = submeshes(cluster)
    parts: list[SubmeshSpec] = []
    free = cluster.num_devices
    for left in range(num_stages, 0, -1):
        fitting = [part for part in known if part.num_devices <= free - left + 1]
        largest = max(part.num_devices for part in fitting)
        weights = np.array([part.num_devices / largest for part in fitting])
        parts.append(fitting[random.choice(len(fitting), p=weights / weights.sum())])
        free -= parts[-1].num_devices
    try:
        stage_dp.place(device_groups(cluster, None), parts)
    except ValueError:
        smallest = min(known, key=lambda part: part.num_devices)
        return [smallest] * num_stages
    return parts


def _random_choice(selection: Selection, random: np.random.Generator) -> ShardingSolution:
    """Return a choice drawn by minimising random node costs; forbidden pairs stay forbidden."""
    problem = selection.problem
    drawn = random.random(problem.node_cost.shape)
    node_cost = np.where(np.isfinite(problem.node_cost), drawn, math.inf)
    edge_cost = np.where(np.isfinite(problem.edge_cost), 0.0, math.inf)
    return ilp_sharding.solve(
        evolve(problem, node_cost=node_cost, edge_cost=edge_cost, memory_limit=None),
        # counted work, so that a seed gives the same plan on a busy machine; any choice will do
        ilp_sharding.SolveOptions(rounds=LEAST_ROUNDS, seed=int(random.integers(1 << 30))),
    )
