"""What devices need that run several stages, beside what lives while each of their steps runs."""

import numpy as np
import pytest
from attrs import evolve

from alpa_interchange import LogicalMesh, MeshAxis, PlacedStage, StageCandidate, StagePlan
from alpa_interchange.mesh import SubmeshSpec
from stage_dp import device_bytes, order, peak_bytes, with_device_bytes
from stage_dp.interleaved_order import interleaved_order


def interleaved(num_meshes, chunks, count, rng):
    """Return an interleaved pipeline of stages with random bytes."""
    in_flight = interleaved_order(num_meshes, chunks, count).in_flight
    stages = tuple(
        PlacedStage(
            candidate=StageCandidate(
                layer_start=k,
                layer_stop=k + 1,
                submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
                logical=LogicalMesh(axes=(MeshAxis(name="data", size=1),)),
                num_microbatches=count,
                forward_seconds=1.0,
                backward_seconds=1.0,
                state_bytes=float(rng.integers(10)),
                activation_bytes=float(rng.integers(10)),
                transient_bytes=float(rng.integers(10)),
            ),
            device_ids=(k % num_meshes,),
        )
        for k in range(num_meshes * chunks)
    )
    return StagePlan(
        stages=stages,
        num_microbatches=count,
        schedule="interleaved-1f1b",
        step_seconds=1.0,
        lower_bound=0.0,
        peak_bytes=tuple(
            peak_bytes(stage.candidate, k) for stage, k in zip(stages, in_flight, strict=True)
        ),
        in_flight=in_flight,
    )


def most_alive(plan):
    """Return the most bytes that each device holds, step by step."""
    num, meshes = len(plan.stages), plan.num_meshes
    own = [stage.candidate for stage in plan.stages]
    steps = order(plan.schedule, num, plan.num_microbatches, num_meshes=meshes).steps
    found = []
    for mesh in range(meshes):
        held = most = sum(one.state_bytes for one in own[mesh::meshes])
        for step in steps[mesh]:
            held += own[step.stage].activation_bytes * (step.phase == "forward")
            most = max(most, held)
            held -= own[step.stage].activation_bytes * (step.phase == "backward")
        found.append(most + max(one.transient_bytes for one in own[mesh::meshes]))
    return found


@pytest.mark.parametrize(("num_meshes", "chunks"), [(1, 3), (2, 2), (3, 4), (5, 2), (6, 4)])
def test_devices_need_what_their_stages_hold_at_one_time(num_meshes, chunks):
    rng = np.random.default_rng(num_meshes)
    for count in (1, 2, num_meshes, 3 * num_meshes + 1, 6 * num_meshes + 2, 9 * num_meshes):
        plan = interleaved(num_meshes, chunks, count, rng)
        assert list(device_bytes(plan)) == most_alive(plan) * chunks
        told = with_device_bytes(plan).device_bytes
        assert told == (() if chunks == 1 else device_bytes(plan))


def test_stages_with_devices_of_their_own_need_their_peaks():
    plan = interleaved(3, 2, 4, np.random.default_rng(0))
    alone = tuple(evolve(one, device_ids=(k,)) for k, one in enumerate(plan.stages))
    plan = evolve(plan, stages=alone, schedule="1f1b")
    assert device_bytes(plan) == plan.peak_bytes
    assert device_bytes(evolve(plan, peak_bytes=())) == ()
    assert with_device_bytes(plan) == plan
