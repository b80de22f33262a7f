"""More programs of slices than a host compiles are refused, with the slices that are not too
many."""

import pytest

from alpa_interchange import PlacedStage, StageCandidate, StagePlan, SubmeshSpec
from alpa_interchange.mesh import LogicalMesh, MeshAxis
from alpa_meta.errors import PlanError
from alpa_meta.token_slices.budget import check_budget, num_programs
from cost_model import cluster


def eight_stages(schedule):
    candidate = StageCandidate(
        layer_start=0,
        layer_stop=1,
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        num_microbatches=1,
        forward_seconds=1.0,
        backward_seconds=1.0,
    )
    return StagePlan(
        stages=tuple(PlacedStage(candidate=candidate, device_ids=(device,)) for device in range(8)),
        num_microbatches=1,
        schedule=schedule,
        step_seconds=1.0,
        lower_bound=1.0,
        peak_bytes=(),
    )


def test_more_programs_than_a_host_compiles_are_refused():
    with pytest.raises(PlanError, match="are 192 programs to compile on one host, 16 for"):
        check_budget(eight_stages("1f1b"), cluster("h100:1x8"), 12)
    assert num_programs(2, "zero-bubble-h1", 3) == 18


def test_each_host_compiles_the_programs_of_its_own_stages():
    check_budget(eight_stages("1f1b"), cluster("h100:8x1"), 64)
    with pytest.raises(PlanError, match="are 130 programs to compile on one host, 2 for"):
        check_budget(eight_stages("1f1b"), cluster("h100:8x1"), 65)
