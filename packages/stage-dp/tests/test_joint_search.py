"""The joint search against brute force over all pipelines, rows, counts and schedules."""

import itertools
import math

import numpy as np
import pytest
from attrs import evolve
from joint_oracle import brute_force, link_between, waiting_bytes
from joint_problems import SCHEDULES, equal_layers, logical, random_problem

from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from stage_dp import (
    InfeasibleError,
    default_warmups,
    joint_search,
    order,
    pipeline_time,
    solve_joint,
)


@pytest.mark.sample(seed=40)
@pytest.mark.parametrize("seed", range(160))
def test_random_problems_against_all_pipelines(seed):
    problem = random_problem(seed)
    best = brute_force(problem)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_joint(problem)
        return
    plan = solve_joint(problem)
    assert plan.step_seconds == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert recomputed(problem, plan) == pytest.approx(plan.step_seconds)


def recomputed(problem, plan):
    """Return the step time of a plan from the menu, by the longest path of its schedule."""
    samples = problem.batch_size // plan.num_microbatches
    forward, backward, weight, tail, crossing = [], [], [], [], []
    least = default_warmups("1f1b", len(plan.stages), plan.num_microbatches)
    for number, stage in enumerate(plan.stages):
        menu = problem.menu.meshes[stage.mesh]
        classes = problem.menu.class_of_layer[stage.layer_start : stage.layer_stop]
        rows = [menu.rows[c][r] for c, r in zip(classes, stage.rows, strict=True)]
        change = sum(
            menu.convert(a.layout_out, b.layout_in, samples) for a, b in itertools.pairwise(rows)
        )
        forward.append(sum(r.forward.value(samples) for r in rows) + change / 2)
        backward.append(
            sum(r.backward_input.value(samples) + r.backward_weight.value(samples) for r in rows)
            + change / 2
        )
        if plan.schedule == "zero-bubble-h1":
            backward[-1] += sum(r.split_seconds.value(samples) for r in rows)
        weight.append(sum(r.backward_weight.value(samples) for r in rows))
        tail.append(sum(r.step_seconds for r in rows))
        group = problem.device_groups[menu.submesh.host_group]
        split = plan.schedule == "zero-bubble-h1"
        waiting = plan.in_flight[number] - least[number] if split else 0
        need = (
            sum(r.state_bytes for r in rows)
            + (plan.in_flight[number] - waiting)
            * sum(r.activation_bytes.value(samples) for r in rows)
            + waiting * sum(waiting_bytes(r, samples) for r in rows)
            + split * sum(r.delayed_bytes.value(samples) for r in rows)
            + max(r.transient_bytes.value(samples) for r in rows)
        )
        assert need == pytest.approx(plan.peak_bytes[number])
        assert need <= group.memory * (1 + 1e-9)
        if number + 1 < len(plan.stages):
            after = plan.stages[number + 1]
            following = problem.menu.meshes[after.mesh].rows[
                problem.menu.class_of_layer[after.layer_start]
            ][after.rows[0]]
            link = link_between(problem, stage.device_ids, after.device_ids)
            cost = problem.boundary(
                stage.mesh, rows[-1].layout_out, after.mesh, following.layout_in, link
            )
            crossing.append(cost.value(samples))
    schedule = order(plan.schedule, len(plan.stages), plan.num_microbatches, warmups=plan.in_flight)
    return pipeline_time(schedule, forward, backward, crossing, tail, weight=weight).step_seconds


@pytest.mark.sample(seed=20)
@pytest.mark.parametrize("seed", range(60))
def test_relaxed_bounds_hold_where_pipelines_are_not_enumerated(seed, monkeypatch):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    problem = random_problem(seed, use_all_devices=False)
    best = brute_force(problem)
    if math.isinf(best):
        return
    try:
        plan = solve_joint(problem)
    except InfeasibleError:
        return
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert recomputed(problem, plan) == pytest.approx(plan.step_seconds)


@pytest.mark.sample(seed=15)
@pytest.mark.parametrize("seed", range(40))
def test_without_enumeration_plans_are_within_a_hundredth_of_the_best(seed, monkeypatch):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    problem = random_problem(seed)
    best = brute_force(problem)
    if math.isfinite(best):
        assert solve_joint(problem).step_seconds <= best * 1.01


@pytest.mark.parametrize("update", [5.0, 6.0, 8.0])
def test_long_updates_are_not_hidden_by_the_work_of_other_stages(update):
    """Two hosts take half the time for a layer, but its update is long: eight stages of one host
    take 64 times five layers and once the others."""
    problem = equal_layers(33, {1: (1.0, 0.0), 2: (0.5, update)}, num_hosts=8)
    assert solve_joint(problem).step_seconds <= 64 * 5 + 33 - 5 + 1e-9


@pytest.mark.sample(seed=15)
@pytest.mark.parametrize("seed", range(40))
def test_a_larger_space_never_gives_a_slower_plan(seed):
    rng = np.random.default_rng(seed)
    large = random_problem(seed, schedules=SCHEDULES, num_stages=None, use_all_devices=False)
    meshes = tuple(mesh for mesh in large.menu.meshes if rng.random() < 0.7)
    small = evolve(
        large,
        menu=evolve(large.menu, meshes=meshes or large.menu.meshes),
        schedules=SCHEDULES[: int(rng.integers(1, 5))],
        counts=large.counts[:1],
    )
    try:
        least = solve_joint(small)
    except InfeasibleError:
        return
    assert solve_joint(large).step_seconds <= least.step_seconds * (1 + 1e-9)


def test_every_number_of_microbatches_is_tried():
    """On three hosts, one layer each, n of nine examples' microbatches take (n + 2) times twice
    (1 + 9 / n) seconds: 40 with 3 microbatches, 44 with 9 and 60 with one."""
    problem = equal_layers(3, {1: (3.0, 0.0)}, num_hosts=3)
    (mesh,) = problem.menu.meshes
    pass_seconds = Affine(1.0, 1.0)
    ((row,),) = mesh.rows
    row = evolve(row, forward=pass_seconds, backward_input=pass_seconds, backward_weight=Affine())
    menu = evolve(problem.menu, meshes=(evolve(mesh, rows=((row,),)),))
    plan = solve_joint(evolve(problem, menu=menu, batch_size=9, counts=None))
    assert (plan.num_microbatches, plan.step_seconds) == (3, 40.0)


def test_a_deadline_ends_the_search_with_a_plan_and_a_bound():
    problem = random_problem(1, schedules=SCHEDULES, num_stages=None)
    best = solve_joint(problem)
    plan = solve_joint(evolve(problem, deadline_seconds=1e-9))
    assert not plan.complete
    assert plan.lower_bound <= best.step_seconds <= plan.step_seconds
    assert best.complete


@pytest.mark.sample(seed=6)
@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_starts_at_a_plan_is_no_worse_than_the_plan(seed):
    problem = random_problem(seed, num_stages=None, use_all_devices=False)
    try:
        plan = solve_joint(problem)
    except InfeasibleError:
        return
    again = solve_joint(problem, plan)
    assert again.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert again.lower_bound <= again.step_seconds
    less = tuple(evolve(group, memory=0.8 * group.memory) for group in problem.device_groups)
    tight = evolve(problem, device_groups=less)
    try:
        fresh = solve_joint(tight)
    except InfeasibleError:
        return
    assert solve_joint(tight, plan).step_seconds == pytest.approx(fresh.step_seconds)


@pytest.mark.sample(seed=6)
@pytest.mark.parametrize("seed", range(12))
def test_what_the_rows_of_a_stage_do_not_work_with_is_room_for_others(seed):
    rng = np.random.default_rng(seed)
    layers, memory = 14, 70.0
    kept, worked_with = rng.uniform(0.5, 5.0, 6), rng.uniform(0, 20, 6)
    rows = tuple(
        LayerRow(
            forward=Affine(0.0, 3.0 - 0.4 * activation - 0.02 * transient),
            backward_input=Affine(),
            state_bytes=1.0,
            activation_bytes=Affine(0.0, activation),
            transient_bytes=Affine(transient),
        )
        for activation, transient in zip(kept, worked_with, strict=True)
    )
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1), logical=logical(1), rows=(rows,)
    )
    found = solve_joint(
        JointProblem(
            menu=LayerMenu(class_of_layer=(0,) * layers, meshes=(mesh,)),
            batch_size=1,
            device_groups=(DeviceGroup(num_hosts=1, devices_per_host=1, memory=memory),),
            num_stages=1,
            schedules=("1f1b",),
        )
    )
    # Layers are alike: only how many take each row matters.
    best = min(
        sum(row.forward.value(1) for row in some)
        for some in itertools.combinations_with_replacement(rows, layers)
        if sum(row.state_bytes + row.activation_bytes.value(1) for row in some)
        + max(row.transient_bytes.value(1) for row in some)
        <= memory
    )
    assert found.step_seconds == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(("waiting", "in_flight"), [(None, (2, 1)), (0.5, (2, 2))])
def test_microbatches_that_wait_for_their_backward_by_weight_keep_less(waiting, in_flight):
    # The second stage keeps 3 of a microbatch, and 0.5 besides for the one that runs by weight.
    # Where another one that waits keeps 0.5 in all, it has the room for that, else only for one.
    second = Affine(0.0, 1.0)

    def row(activation):
        return LayerRow(
            forward=second,
            backward_input=second,
            backward_weight=second,
            activation_bytes=Affine(0.0, activation),
            delayed_bytes=Affine(0.0, 0.5),
            waiting_bytes=None if waiting is None else Affine(0.0, waiting),
        )

    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=logical(1),
        rows=((row(2.0),), (row(3.0),)),
    )
    plan = solve_joint(
        JointProblem(
            menu=LayerMenu(class_of_layer=(0, 1), meshes=(mesh,)),
            batch_size=4,
            device_groups=(DeviceGroup(num_hosts=1, devices_per_host=2, memory=4.5),),
            counts=(4,),
            schedules=("zero-bubble-h1",),
            num_stages=2,
        )
    )
    assert plan.in_flight == in_flight
    assert plan.peak_bytes == (4.5, 3.5 if waiting is None else 4.0)
    assert plan.lower_bound == pytest.approx(plan.step_seconds)


def test_slices_of_as_many_microbatches_are_alive_as_the_schedule_says():
    row = LayerRow(
        forward=Affine(0.0, 1.0),
        backward_input=Affine(0.0, 2.0),
        activation_bytes=Affine(0.0, 1.0),
        kept_bytes=Affine(0.0, 0.5),
    )
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1), logical=logical(1), rows=((row,),)
    )
    problem = JointProblem(
        menu=LayerMenu(class_of_layer=(0, 0), meshes=(mesh,)),
        batch_size=32,  # slices: of 8 microbatches four each
        counts=(32,),
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=2, memory=8.5),),
        schedules=("1f1b",),
        num_stages=2,
        num_slices=4,
    )
    plan = solve_joint(problem)
    assert plan.in_flight == (8, 4)
    assert plan.peak_bytes == (8.5, 4.5)
    assert plan.step_seconds == 32 * 3 + 3
    with pytest.raises(InfeasibleError):
        solve_joint(evolve(problem, schedules=("gpipe",)))
