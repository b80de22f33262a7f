"""How often the passes of a pipeline's stages count beside their updates."""

import pytest

import stage_dp
from alpa_interchange import LogicalMesh, MeshAxis, PlacedStage, StageCandidate, StagePlan
from alpa_interchange.mesh import SubmeshSpec
from alpa_meta.planning.counted_passes import counted_passes


def _stage(number, seconds, update):
    candidate = StageCandidate(
        layer_start=number,
        layer_stop=number + 1,
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        num_microbatches=8,
        forward_seconds=seconds / 2,
        backward_seconds=seconds / 2,
        step_seconds=update,
        state_bytes=1.0,
    )
    return PlacedStage(candidate=candidate, device_ids=(number,))


@pytest.mark.parametrize(
    ("seconds", "update", "expected"),
    [
        # The first stage waits for the second, whose update hides behind its last backward.
        ((2.0, 4.0), 0.5, (2, 9)),
        # The first is the slowest: 8 of its passes delay the step, the second's one.
        ((4.0, 2.0), 0.5, (8, 9)),
    ],
)
def test_passes_count_as_often_as_they_delay_the_step(seconds, update, expected):
    stages = tuple(_stage(number, one, update) for number, one in enumerate(seconds))
    chain = [stage.candidate for stage in stages]
    flying = stage_dp.in_flight_counts(chain, "1f1b")
    plan = StagePlan(
        stages=stages,
        num_microbatches=8,
        schedule="1f1b",
        step_seconds=stage_dp.step_seconds(chain, "1f1b", flying),
        lower_bound=0.0,
        peak_bytes=(2.0, 2.0),
        in_flight=flying,
    )
    assert counted_passes(plan) == expected
