"""Stage problems and plans: what they refuse, and that they survive a file."""

from typing import Any

import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import (
    DeviceGroup,
    PlacedStage,
    StageCandidate,
    StagePlan,
    StageProblem,
)


def candidate(**changes: object) -> StageCandidate:
    arguments: dict[str, Any] = {
        "layer_start": 0,
        "layer_stop": 2,
        "submesh": SubmeshSpec(num_hosts=1, devices_per_host=2),
        "logical": LogicalMesh(axes=(MeshAxis(name="data", size=2),)),
        "num_microbatches": 4,
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "lower_bound_seconds": 2.5,
    }
    return StageCandidate(**{**arguments, **changes})


def test_a_candidate_takes_the_forward_plus_the_backward_time() -> None:
    assert candidate().seconds == 3.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_stop": 0}, "layer_stop must be above 0"),
        ({"layer_start": 2}, "layer_stop must be above layer_start, got layers 2..2"),
        ({"forward_seconds": -1.0}, "forward_seconds must be at least 0"),
        ({"num_microbatches": 0}, "num_microbatches must be above 0"),
        ({"state_bytes": float("nan")}, "state_bytes must be at least 0"),
    ],
)
def test_impossible_candidates_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidate(**changes)


def test_a_problem_survives_a_round_trip_through_json() -> None:
    problem = StageProblem(
        num_layers=2,
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=2, memory=1e9),),
        candidates=(candidate(),),
        schedules=("1f1b", "gpipe"),
        num_stages=1,
        use_all_devices=True,
    )
    assert from_json(to_json(problem), StageProblem) == problem


def test_a_plan_survives_a_round_trip_and_tells_its_gap() -> None:
    plan = StagePlan(
        stages=(PlacedStage(candidate=candidate(), device_ids=(0, 1)),),
        num_microbatches=4,
        schedule="1f1b",
        step_seconds=12.0,
        lower_bound=9.0,
        peak_bytes=(5.0,),
        in_flight=(1,),
    )
    assert from_json(to_json(plan), StagePlan) == plan
    assert plan.gap == 0.25
