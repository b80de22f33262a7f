"""Bounds count the seconds that crossing to the next mesh takes at least."""

import functools

import numpy as np
import pytest
from attrs import evolve

from alpa_interchange.menu import (
    Affine,
    JointProblem,
    LayerFloor,
    LayerMenu,
    LayerRow,
    MeshMenu,
)
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from stage_dp import solve_joint

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "adaptive", "zero-bubble-h1")


def solved(layers, batch, count, schedule, stages=None):
    """Return the plans of two meshes 5 s apart, without and with that as a floor."""
    forward, backward, both = (Affine(0.0, seconds) for seconds in (1.0, 2.0, 3.0))
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        rows=((LayerRow(forward=forward, backward_input=backward),),),
        floors=(
            (LayerFloor(seconds=both, forward=forward, forward_and_input=both, backward=backward),),
        ),
    )
    problem = JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * layers, meshes=(mesh,)),
        batch_size=batch,
        counts=(count,),
        schedules=(schedule,),
        num_stages=stages,
        device_groups=(DeviceGroup(num_hosts=2, devices_per_host=1, memory=1.0),),
        boundary=lambda *place: Affine(5.0),
    )
    floor = evolve(problem, boundary_floor=lambda *place: Affine(5.0))
    return solve_joint(problem), solve_joint(floor)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_bound_of_floors_counts_the_seconds_to_the_next_mesh(schedule, count):
    free, plan = solved(2, 8, count, schedule, stages=2)
    assert plan.step_seconds == free.step_seconds
    assert free.lower_bound < plan.lower_bound <= plan.step_seconds
    if count == 1 and schedule != "zero-bubble-h1":
        # Nothing waits: a forward and a backward of each stage, the way there and back.
        assert plan.lower_bound == pytest.approx(plan.step_seconds) == 8 * 6 + 10


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize("stages", [3, 4])
def test_bounds_count_that_stages_of_two_hosts_cross_from_one_to_the_other(stages, floors):
    def link(*place):
        return Affine(5.0 if place[-1] == "hosts" else 0.0)

    forward, backward, both = (Affine(0.0, seconds) for seconds in (1.0, 2.0, 3.0))
    floor = LayerFloor(seconds=both, forward=forward, forward_and_input=both, backward=backward)
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        rows=((LayerRow(forward=forward, backward_input=backward),),),
        floors=((floor,),) if floors else (),
    )
    problem = JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * 12, meshes=(mesh,)),
        batch_size=8,
        counts=(1,),
        schedules=("1f1b",),
        num_stages=stages,
        device_groups=(DeviceGroup(num_hosts=2, devices_per_host=2, memory=1.0),),
        boundary=link,
        boundary_floor=link,
    )
    plan = solve_joint(problem)
    assert plan.lower_bound == pytest.approx(plan.step_seconds) == 12 * 8 * 3 + 2 * 5


@pytest.mark.parametrize("schedule", ["1f1b", "adaptive", "zero-bubble-h1"])
def test_with_floors_fewer_boundaries_are_priced_for_the_same_plans(schedule):
    asked = np.array([_asked(seed, schedule) for seed in range(6)])
    assert (asked[:, 1] <= asked[:, 0]).all()
    if schedule != "zero-bubble-h1":  # whose least seconds leave out too much
        assert asked[:, 1].sum() < 0.9 * asked[:, 0].sum()


def _asked(seed, schedule):
    """Return how many boundaries are priced without and with floors, for equally good plans."""
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(1.0, 4.0, (2, 3, 2))
    asked: list[set[tuple[int, int, int, int, str]]] = [set(), set()]

    def price(which, *place):
        asked[which].add(place)
        _, out, _, into, _ = place
        return Affine(float(cost[out, into]))

    cost = rng.uniform(0.5, 4.0, (3, 3))
    meshes = tuple(
        MeshMenu(
            submesh=SubmeshSpec(num_hosts=1, devices_per_host=1 + k),
            logical=LogicalMesh(axes=(MeshAxis(name="x", size=1 + k),)),
            layouts=("a", "b", "c"),
            rows=(
                tuple(
                    LayerRow(
                        forward=Affine(float(own[0]) / (1 + k)),
                        backward_input=Affine(float(own[1]) / (1 + k)),
                        layout_in=layout,
                        layout_out=layout,
                    )
                    for layout, own in enumerate(seconds[k])
                ),
            ),
        )
        for k in range(2)
    )
    free = JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * 6, meshes=meshes),
        batch_size=8,
        counts=(4, 8),
        schedules=(schedule,),
        device_groups=(DeviceGroup(num_hosts=2, devices_per_host=2, memory=1.0),),
        boundary=functools.partial(price, 0),
    )
    floored = evolve(
        free,
        boundary=functools.partial(price, 1),
        boundary_floor=lambda *place: Affine(float(cost.min())),
    )
    plan, same = solve_joint(free), solve_joint(floored)
    assert same.step_seconds == pytest.approx(plan.step_seconds, rel=1e-12)
    return [len(one) for one in asked]


@pytest.mark.parametrize("count", [2, 8, 64])
def test_the_bound_of_interleaved_pipelines_counts_the_way_round_the_meshes(count):
    free, plan = solved(4, 64, count, "interleaved-1f1b")
    assert plan.step_seconds == free.step_seconds
    # With two chunks of two meshes, the last stage begins after three crossings.
    assert free.lower_bound + 9.9 <= plan.lower_bound <= plan.step_seconds
