"""Lower bounds hold for every pipeline, schedule and transfer time, and can be close."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup, StageCandidate, StageProblem
from stage_dp import SCHEDULE_RULES, solve_stages, step_seconds
from stage_dp.device_pool import DevicePool
from stage_dp.stage_bound import quick_bound, refined_bound
from stage_dp.stage_table import StageTable

ONE_STAGE_PER_MESH = [
    name for name, rule in SCHEDULE_RULES.items() if rule.has_backward and not rule.interleaves
]
ONE = SubmeshSpec(num_hosts=1, devices_per_host=1)


def chain_of(forward, backward, crossing, update, microbatches, later=0.0):
    return tuple(
        StageCandidate(
            layer_start=k,
            layer_stop=k + 1,
            submesh=ONE,
            logical=LogicalMesh(axes=(MeshAxis(name="data", size=1),)),
            num_microbatches=microbatches,
            forward_seconds=forward[k],
            backward_seconds=backward[k],
            backward_weight_seconds=later * backward[k],
            boundary_seconds=crossing[k],
            step_seconds=update[k],
            lower_bound_seconds=forward[k] + backward[k],
        )
        for k in range(len(forward))
    )


def table_of(chain, schedule):
    groups = (DeviceGroup(num_hosts=1, devices_per_host=len(chain), memory=1.0),)
    problem = StageProblem(
        num_layers=len(chain), device_groups=groups, candidates=chain, schedules=(schedule,)
    )
    return StageTable(problem, chain, schedule, DevicePool(groups, [ONE]))


times = st.lists(st.floats(0, 3), min_size=6, max_size=6)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    schedule=st.sampled_from(ONE_STAGE_PER_MESH),
    later=st.floats(0, 1),
    num_stages=st.integers(1, 6),
    microbatches=st.integers(1, 9),
    forward=times,
    backward=times,
    crossing=times,
    update=times,
    slow_links=st.booleans(),
)
def test_no_pipeline_is_faster_than_its_bound(
    schedule, later, num_stages, microbatches, forward, backward, crossing, update, slow_links
):
    crossing = [c * (1.0 if slow_links else 0.1) for c in crossing]
    n = num_stages
    chain = chain_of(forward[:n], backward[:n], crossing[:n], update[:n], microbatches, later)
    table = table_of(chain, schedule)
    most = SCHEDULE_RULES[schedule].most_in_flight
    exact = step_seconds(chain, schedule, most(n, microbatches) if most else None)
    quick = quick_bound(table)
    assert quick <= exact * (1 + 1e-9) + 1e-12
    refined = refined_bound(table, quick, 2 * exact + 1.0)
    assert quick <= refined <= exact * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bound_of_equal_stages_without_transfers_is_their_step_time(schedule):
    chain = chain_of([1.0] * 4, [2.0] * 4, [0.0] * 4, [0.0] * 4, 16)
    table = table_of(chain, schedule)
    assert quick_bound(table) == pytest.approx(16 * 3 + 3 * 3)
    # The last stage may be light and the way there short; the bound then counts the idle time.
    chain = chain_of([1.0] * 3 + [0.8], [2.0] * 3 + [1.6], [0.0] * 4, [0.0] * 4, 16)
    table = table_of(chain, schedule)
    exact = step_seconds(chain, schedule)
    assert refined_bound(table, quick_bound(table), exact) >= 0.97 * exact


def test_one_stage_is_proven_optimal():
    chain = chain_of([1.0], [2.0], [0.0], [0.5], 4)
    groups = (DeviceGroup(num_hosts=1, devices_per_host=1, memory=1.0),)
    plan = solve_stages(StageProblem(num_layers=1, device_groups=groups, candidates=chain))
    assert plan.step_seconds == plan.lower_bound == pytest.approx(12.5)
    assert plan.gap == pytest.approx(0.0)
