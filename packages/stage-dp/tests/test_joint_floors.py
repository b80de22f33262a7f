"""Bounds by floors against brute force over all pipelines and what floors stand for."""

import math

import numpy as np
import pytest
from attrs import evolve
from joint_oracle import brute_force
from joint_problems import equal_layers, random_problem

from alpa_interchange.menu import (
    Affine,
    JointProblem,
    KeptFloor,
    LayerFloor,
    LayerMenu,
    LayerRow,
    MeshMenu,
    PricedFloor,
)
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from stage_dp import (
    InfeasibleError,
    bound_joint,
    joint_search,
    solve_joint,
)
from stage_dp.joint_interleaved import best_interleaved


@pytest.mark.sample(seed=6)
@pytest.mark.parametrize("seed", range(12))
def test_floors_lower_the_bound_and_leave_the_plan(seed):
    problem = random_problem(seed, num_stages=None, use_all_devices=False)
    try:
        plan = solve_joint(problem)
    except InfeasibleError:
        return
    assert floored(problem, 1.0).lower_bound <= plan.step_seconds * (1 + 1e-9)
    half = floored(problem, 0.5)
    assert half.step_seconds == pytest.approx(plan.step_seconds, rel=1e-2)
    # A menu whose rows take half as long has no better plan than that bound.
    faster = evolve(
        problem,
        menu=evolve(
            problem.menu,
            meshes=tuple(
                evolve(mesh, rows=tuple(tuple(map(halved, rows)) for rows in mesh.rows))
                for mesh in problem.menu.meshes
            ),
        ),
    )
    assert half.lower_bound <= solve_joint(faster).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.5, 0.97, 2.0])
def test_bounds_are_raised_no_further_than_what_is_enough(share, monkeypatch):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    for seed in range(4):
        problem = loosened(random_problem(seed, num_stages=None, use_all_devices=False))
        plan = solve_joint(problem)
        enough = share * plan.lower_bound
        early = solve_joint(problem, enough=enough)
        assert early.step_seconds == plan.step_seconds
        assert min(enough, plan.lower_bound) * (1 - 1e-9) <= early.lower_bound
        assert early.lower_bound <= early.step_seconds


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("share", [0.9, 1.001, 1.2])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_worth_it_is_found_and_bounds_hold(seed, share, monkeypatch):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    problem = random_problem(seed, num_stages=None, use_all_devices=False)
    try:
        plan = solve_joint(problem)
    except InfeasibleError:
        return
    worth = share * plan.step_seconds
    found = solve_joint(problem, worth=worth)
    assert found.step_seconds >= plan.step_seconds * (1 - 1e-9)
    assert found.lower_bound <= plan.step_seconds * (1 + 1e-9)
    if share > 1.1:  # nearer to it, what is improved may begin beyond
        assert found.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)


def test_pipelines_that_are_not_worth_it_are_not_looked_for(monkeypatch):
    asked = []

    def search(some, limit):
        asked.append(limit)
        return best_interleaved(some, limit)

    monkeypatch.setattr(joint_search, "best_interleaved", search)
    problem = random_problem(1, num_stages=None, use_all_devices=False)
    plan = solve_joint(problem)
    solve_joint(problem, worth=0.5 * plan.step_seconds)
    without, with_it = asked
    assert with_it == 0.5 * plan.step_seconds < without


def loosened(problem):
    """Return the problem with floors that say nothing yet."""
    meshes = tuple(
        evolve(mesh, floors=tuple((LayerFloor(),) for _ in mesh.rows))
        for mesh in problem.menu.meshes
    )
    loose = evolve(problem, menu=evolve(problem.menu, meshes=meshes))
    # Equal layouts are the nearest.
    return evolve(loose, boundary_floor=lambda _, a, b, link: problem.boundary(a, 0, b, 0, link))


def halved(row):
    def half(cost):
        return Affine(cost.fixed / 2, cost.each / 2)

    return evolve(
        row,
        forward=half(row.forward),
        backward_input=half(row.backward_input),
        backward_weight=half(row.backward_weight),
        step_seconds=row.step_seconds / 2,
    )


def slowed(menu):
    """Return the menu with rows that no pipeline would have."""
    return evolve(
        menu,
        meshes=tuple(
            evolve(
                mesh,
                rows=tuple(
                    tuple(evolve(row, forward=Affine(1e6)) for row in rows) for rows in mesh.rows
                ),
            )
            for mesh in menu.meshes
        ),
    )


def floored(problem, share):
    """Return the plan where every mesh has its rows, times `share`, as floors."""

    def floor(row):
        parts = (row.forward, row.backward_input, row.backward_weight)
        return LayerFloor(
            seconds=Affine(
                share * sum(part.fixed for part in parts), share * sum(part.each for part in parts)
            ),
            step_seconds=share * row.step_seconds,
            state_bytes=row.state_bytes,
            kept=(KeptFloor(activation_bytes=row.activation_bytes),),
        )

    meshes = tuple(
        evolve(mesh, floors=tuple(tuple(map(floor, rows)) for rows in mesh.rows))
        for mesh in problem.menu.meshes
    )
    return solve_joint(evolve(problem, menu=evolve(problem.menu, meshes=meshes)))


@pytest.mark.sample(seed=15)
@pytest.mark.parametrize("seed", range(40))
def test_sharper_floors_raise_the_bound_and_stay_below_all_pipelines(seed, monkeypatch):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    problem = random_problem(seed, num_stages=None, use_all_devices=False)
    best = brute_force(problem)
    if math.isinf(best):
        return
    asked = []

    def floors_at(mesh, number, samples):
        asked.append((mesh, number, samples))
        rows = problem.menu.meshes[mesh].rows[number]
        return floors_of_rows([r for r in rows if samples % r.batch_split == 0], samples, problem)

    loose = loosened(problem)
    try:
        before = solve_joint(loose)
    except InfeasibleError:
        return
    plan = solve_joint(evolve(loose, floors_at=floors_at))
    assert before.lower_bound == 0.0
    assert asked and len(set(asked)) == len(asked)
    assert plan.step_seconds == pytest.approx(before.step_seconds)
    assert 0.3 * best <= plan.lower_bound <= best * (1 + 1e-9)
    without_rows = evolve(loose, menu=slowed(loose.menu), floors_at=floors_at)
    assert bound_joint(without_rows, best) <= best * (1 + 1e-9)
    assert bound_joint(without_rows, 0.1 * best) == pytest.approx(0.1 * best, rel=1e-3)


@pytest.mark.sample(seed=15)
@pytest.mark.parametrize("seed", range(40))
def test_what_layers_in_a_row_take_more_raises_the_bound_and_stays_below_all(seed, monkeypatch):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    problem = random_problem(seed, num_stages=None, use_all_devices=False)
    best = brute_force(problem)
    if math.isinf(best):
        return
    rng = np.random.default_rng(seed)

    def floors_at(mesh, number, samples):
        menu = problem.menu.meshes[mesh]
        rows = [r for r in menu.rows[number] if samples % r.batch_split == 0]
        found = floors_of_rows(rows, samples, problem)
        return tuple(in_a_row(one, rows, menu, samples, problem, rng) for one in found)

    loose = loosened(problem)
    try:
        plan = solve_joint(evolve(loose, floors_at=floors_at))
    except InfeasibleError:
        return
    assert plan.lower_bound <= best * (1 + 1e-9)


def in_a_row(floor, rows, menu, samples, problem, rng):
    """Return a floor with what the best of some random numbers of the layouts makes of it."""
    count = problem.batch_size // samples
    best = (0.0, 0.0)
    for scale in (0.0, 0.1, 0.3, 1.0):
        number = scale * rng.uniform(0, 1, size=len(menu.layouts))
        more = []
        for one in floor.priced:
            least = min(
                count * (whole_seconds(r, samples) + menu.convert(y, r.layout_in, samples))
                + r.step_seconds
                + one.price * r.state_bytes
                + number[r.layout_out]
                - number[y]
                for r in rows
                for y in range(len(menu.layouts))
            )
            more.append(least - one.step_seconds)
        best = max(best, (max(min(more), 0.0), float(np.ptp(number))))
    return evolve(floor, follow_seconds=best[0], run_seconds=best[1])


def whole_seconds(row, samples):
    parts = (row.forward, row.backward_input, row.backward_weight)
    return sum(part.value(samples) for part in parts)


def test_layers_in_a_row_pay_for_the_layouts_that_they_hand_over():
    def row(seconds, layout_out):
        return LayerRow(
            forward=Affine(seconds), backward_input=Affine(0.0), layout_in=0, layout_out=layout_out
        )

    problem = equal_layers(4, {1: (1.0, 0.0)}, num_hosts=1)
    (mesh,) = problem.menu.meshes
    rows = (row(1.0, 1), row(1.2, 0))  # that which leaves layout 1 has to convert before the next
    floor = LayerFloor(priced=(PricedFloor(step_seconds=1.0),))
    mesh = evolve(
        mesh,
        rows=(rows,),
        layouts=("a", "b"),
        conversion={(0, 1): Affine(0.3), (1, 0): Affine(0.3)},
        floors=((floor,),),
    )

    def bound(**changes):
        asked = evolve(floor, **changes)
        menu = evolve(problem.menu, meshes=(mesh,))
        plan = solve_joint(evolve(problem, menu=menu, counts=(1,), floors_at=lambda *_: (asked,)))
        assert plan.step_seconds == pytest.approx(4.6)
        return plan.lower_bound

    assert bound() == pytest.approx(4.0)
    # With the number 0.2 of layout "b", each layer after another takes 1.2 s.
    assert bound(follow_seconds=0.2, run_seconds=0.2) == pytest.approx(4.4)


def floors_of_rows(rows, samples, problem):
    """Return the floors of all mixtures of the rows."""
    if not rows:
        return ()
    count = problem.batch_size // samples
    forward = [r.forward.value(samples) for r in rows]
    inputs = [r.backward_input.value(samples) for r in rows]
    weights = [r.backward_weight.value(samples) for r in rows]
    whole = [sum(parts) for parts in zip(forward, inputs, weights, strict=True)]

    def least(price):
        return min(
            count * t + r.step_seconds + price * r.state_bytes
            for t, r in zip(whole, rows, strict=True)
        )

    return (
        LayerFloor(
            seconds=Affine(min(whole)),
            forward=Affine(min(forward)),
            forward_and_input=Affine(min(map(sum, zip(forward, inputs, strict=True)))),
            backward=Affine(min(map(sum, zip(inputs, weights, strict=True)))),
            step_seconds=min(r.step_seconds for r in rows),
            state_bytes=min(r.state_bytes for r in rows),
            priced=tuple(
                PricedFloor(price=price, step_seconds=least(price)) for price in (0.0, 0.1, 1.0)
            ),
            kept=(
                KeptFloor(
                    activation_bytes=Affine(min(r.activation_bytes.value(samples) for r in rows)),
                    split_seconds=Affine(min(r.split_seconds.value(samples) for r in rows)),
                    delayed_bytes=Affine(min(r.delayed_bytes.value(samples) for r in rows)),
                    waiting_bytes=Affine(min(r.waiting(samples) for r in rows)),
                ),
            ),
        ),
    )


@pytest.mark.parametrize("count", [4, 32])
@pytest.mark.parametrize("room", [0, 1])
def test_bounds_of_split_backwards_count_the_way_back_after_what_may_not_wait(
    count, room, monkeypatch
):
    monkeypatch.setattr(joint_search, "ENUMERATED_LAYERS", 0)
    second = Affine(0.0, 1.0)
    row = LayerRow(
        forward=second,
        backward_input=second,
        backward_weight=second,
        activation_bytes=second,
        delayed_bytes=second,
    )
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        rows=((row,),),
    )
    plan = solve_joint(
        JointProblem(
            menu=LayerMenu(class_of_layer=(0, 0), meshes=(mesh,)),
            batch_size=count,
            device_groups=(DeviceGroup(num_hosts=1, devices_per_host=2, memory=3.0 + room),),
            counts=(count,),
            schedules=("zero-bubble-h1",),
            num_stages=2,
        )
    )
    # The second stage begins after 1 s. Where no part by weight of its may wait, its last backward
    # by input ends 1 s before it does, and the first stage takes 2 s more.
    assert plan.in_flight == (2, 1 + room)
    assert plan.step_seconds == pytest.approx(3 * count + 2 - room)
    assert plan.lower_bound == pytest.approx(plan.step_seconds)
