"""Interleaved pipelines: found where they are faster, within memory, never below their bound."""

import itertools
import random

import pytest
from attrs import evolve

from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup, StageCandidate, StageProblem
from stage_dp import InfeasibleError, solve_stages, step_seconds
from stage_dp.interleaved_search import INTERLEAVED, device_seconds_bound

ONE = SubmeshSpec(num_hosts=1, devices_per_host=1)
LOGICAL = LogicalMesh(axes=(MeshAxis(name="data", size=1),))


def problem_of(layers, num_devices, *, microbatches=8, memory=100.0, **changes):
    """Return a problem whose layers take the given seconds forward and twice that backward."""
    candidates = tuple(
        StageCandidate(
            layer_start=start,
            layer_stop=stop,
            submesh=ONE,
            logical=LOGICAL,
            num_microbatches=microbatches,
            forward_seconds=sum(layers[start:stop]),
            backward_seconds=2 * sum(layers[start:stop]),
            lower_bound_seconds=3 * sum(layers[start:stop]),
            state_bytes=float(stop - start),
            activation_bytes=0.1 * (stop - start),
        )
        for start, stop in itertools.combinations(range(len(layers) + 1), 2)
    )
    groups = (DeviceGroup(num_hosts=1, devices_per_host=num_devices, memory=memory),)
    problem = StageProblem(
        num_layers=len(layers),
        device_groups=groups,
        candidates=candidates,
        schedules=("1f1b", INTERLEAVED),
        num_stages=None,
    )
    return evolve(problem, **changes)


def test_two_chunks_per_mesh_halve_the_bubble():
    # 4 meshes, 8 microbatches of 6 s per mesh: 8 * 6 s of work and 3 * 6 s of bubble, or half.
    plan = solve_stages(problem_of([1.0] * 8, 4))
    assert plan.schedule == INTERLEAVED
    assert (len(plan.stages), plan.num_meshes) == (8, 4)
    assert plan.step_seconds == pytest.approx(8 * 6 + 3 * 3)
    assert [stage.device_ids for stage in plan.stages] == [(k % 4,) for k in range(8)]
    assert plan.lower_bound <= plan.step_seconds
    plain = solve_stages(problem_of([1.0] * 8, 4, schedules=("1f1b",)))
    assert plain.step_seconds == pytest.approx(8 * 6 + 3 * 6)


def test_the_number_of_stages_may_be_given():
    plan = solve_stages(problem_of([1.0] * 8, 4, num_stages=6, schedules=(INTERLEAVED,)))
    assert (len(plan.stages), plan.num_meshes) in {(6, 2), (6, 3)}
    chain = [stage.candidate for stage in plan.stages]
    exact = step_seconds(chain, INTERLEAVED, num_meshes=plan.num_meshes)
    assert plan.step_seconds == pytest.approx(exact)


def test_chunks_of_a_mesh_share_its_memory():
    # Two layers of 1 byte and of 0.1 byte per microbatch in flight on each mesh.
    enough = solve_stages(problem_of([1.0] * 8, 4, memory=3.5))
    assert enough.schedule == INTERLEAVED
    held = [
        sum(enough.peak_bytes[stage] for stage in range(8) if stage % 4 == mesh)
        for mesh in range(4)
    ]
    assert max(held) <= 3.5
    assert solve_stages(problem_of([1.0] * 8, 4, memory=2.85)).schedule == "1f1b"
    with pytest.raises(InfeasibleError) as refused:
        solve_stages(problem_of([1.0] * 8, 4, memory=2.0, schedules=(INTERLEAVED,)))
    assert refused.value.missing_bytes == pytest.approx(max(held) - 2.0)


def test_one_device_cannot_interleave():
    with pytest.raises(InfeasibleError, match="at least two equal submeshes"):
        solve_stages(problem_of([1.0] * 8, 1, schedules=(INTERLEAVED,)))


@pytest.mark.parametrize("seed", range(8))
def test_no_chain_is_faster_than_the_bound_and_the_plan_is_close_to_the_best(seed):
    rng = random.Random(seed)
    problem = problem_of(
        [rng.uniform(0.5, 1.5) for _ in range(6)], 3, microbatches=rng.choice([3, 4, 6]),
        schedules=(INTERLEAVED,),
    )  # fmt: skip
    by_range = {(c.layer_start, c.layer_stop): c for c in problem.candidates}
    best = min(
        step_seconds(
            [by_range[r] for r in itertools.pairwise((0, *cuts, 6))], INTERLEAVED, num_meshes=meshes
        )
        for meshes, chunks in ((2, 2), (2, 3), (3, 2))
        for cuts in itertools.combinations(range(1, 6), meshes * chunks - 1)
    )
    plan = solve_stages(problem)
    assert device_seconds_bound(problem) == plan.lower_bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= plan.step_seconds <= best * 1.1
