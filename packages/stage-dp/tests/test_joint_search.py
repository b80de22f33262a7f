"""The joint search against brute force over all pipelines, rows, counts and schedules."""

import itertools
import math

import numpy as np
import pytest
from attrs import evolve
from joint_problems import SCHEDULES, equal_layers, random_problem

from alpa_interchange.menu import (
    Affine,
    KeptFloor,
    LayerFloor,
    LayerRow,
    PricedFloor,
)
from stage_dp import (
    InfeasibleError,
    default_warmups,
    joint_search,
    order,
    pipeline_time,
    place,
    solve_joint,
)
from stage_dp.batched_time import batched_step_seconds


def chains(problem):
    """Yield (cuts, meshes, devices) of every placeable pipeline."""
    layers, meshes = problem.menu.num_layers, problem.menu.meshes
    total = sum(g.num_hosts * g.devices_per_host for g in problem.device_groups)
    for n in range(1, layers + 1):
        if problem.num_stages not in (None, n):
            continue
        for inner in itertools.combinations(range(1, layers), n - 1):
            for chosen in itertools.product(range(len(meshes)), repeat=n):
                used = sum(meshes[m].submesh.num_devices for m in chosen)
                if used > total or (problem.use_all_devices and used != total):
                    continue
                try:
                    devices = place(problem.device_groups, [meshes[m].submesh for m in chosen])
                except ValueError:
                    continue
                yield (0, *inner, layers), chosen, devices


def link_between(problem, before, after):
    hosts = []
    for g, group in enumerate(problem.device_groups):
        for h in range(group.num_hosts):
            hosts += [(g, h)] * group.devices_per_host
    touched = {hosts[d] for d in (*before, *after)}
    if len(touched) == 1:
        return "host"
    return "hosts" if len({g for g, _ in touched}) == 1 else "groups"


def stage_options(problem, start, stop, mesh, samples):
    """Yield (f, b, u, state, activation, transient, layout in, layout out, b by weight, bytes
    delayed) of all row choices."""
    menu = problem.menu.meshes[mesh]
    rows = [menu.rows[c] for c in problem.menu.class_of_layer[start:stop]]
    for choice in itertools.product(*rows):
        if any(samples % row.batch_split for row in choice):
            continue
        change = sum(
            menu.convert(a.layout_out, b.layout_in, samples) for a, b in itertools.pairwise(choice)
        )
        yield (
            sum(r.forward.value(samples) for r in choice) + change / 2,
            sum(r.backward_input.value(samples) + r.backward_weight.value(samples) for r in choice)
            + change / 2,
            sum(r.step_seconds for r in choice),
            sum(r.state_bytes for r in choice),
            sum(r.activation_bytes.value(samples) for r in choice),
            max(r.transient_bytes.value(samples) for r in choice),
            choice[0].layout_in,
            choice[-1].layout_out,
            sum(r.backward_weight.value(samples) for r in choice),
            sum(r.delayed_bytes.value(samples) for r in choice),
        )


def need(stage, held, delayed=0):
    return stage[3] + held * stage[4] + stage[5] + delayed * stage[9]


def held_by(schedule, stages, count, extras, memory):
    num = len(stages)
    if schedule == "zero-bubble-h1":
        return tuple(
            max(
                k
                for k in range(least, min(num, count) + 1)
                if k == least or need(stage, k, k - least) <= room * (1 + 1e-12)
            )
            for stage, least, room in zip(
                stages, default_warmups("1f1b", num, count), memory, strict=True
            )
        )
    if schedule != "adaptive":
        return default_warmups(schedule, num, count)
    held = [1]
    for extra in reversed(extras):
        held.append(held[-1] + 1 + extra)
    return tuple(min(count, k) for k in reversed(held))


def brute_force(problem):
    """Return the least step time of all pipelines (inf: none fits)."""
    best = math.inf
    for cuts, meshes, devices in chains(problem):
        links = [link_between(problem, a, b) for a, b in itertools.pairwise(devices)]
        memory = [
            problem.device_groups[problem.menu.meshes[m].submesh.host_group].memory for m in meshes
        ]
        for count in problem.counts:
            samples = problem.batch_size // count
            options = [
                list(stage_options(problem, start, stop, mesh, samples))
                for (start, stop), mesh in zip(itertools.pairwise(cuts), meshes, strict=True)
            ]
            groups = {}
            for stages in itertools.product(*options):
                crossing = [
                    problem.boundary(meshes[i], a[7], meshes[i + 1], b[6], links[i]).value(samples)
                    for i, (a, b) in enumerate(itertools.pairwise(stages))
                ]
                extras = [
                    range(math.ceil(2 * c / (a[0] + a[1]) - 1e-9) + 1)
                    for c, a in zip(crossing, stages, strict=False)
                ]
                for schedule in problem.schedules:
                    shares = itertools.product(*extras) if schedule == "adaptive" else [()]
                    for share in shares:
                        held = held_by(schedule, stages, count, share, memory)
                        if all(
                            need(s, k) <= m * (1 + 1e-12)
                            for s, k, m in zip(stages, held, memory, strict=True)
                        ):
                            split = schedule == "zero-bubble-h1"
                            groups.setdefault((held, split), []).append((stages, crossing))
            for (held, split), members in groups.items():
                figures = np.array([stages for stages, _ in members])
                seconds = batched_step_seconds(
                    held,
                    count,
                    figures[:, :, 0],
                    figures[:, :, 1],
                    np.array([c for _, c in members]).reshape(len(members), -1),
                    figures[:, :, 2],
                    figures[:, :, 8] if split else None,
                )
                best = min(best, float(seconds.min()))
    return best


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
        weight.append(sum(r.backward_weight.value(samples) for r in rows))
        tail.append(sum(r.step_seconds for r in rows))
        group = problem.device_groups[menu.submesh.host_group]
        need = (
            sum(r.state_bytes for r in rows)
            + plan.in_flight[number] * sum(r.activation_bytes.value(samples) for r in rows)
            + max(r.transient_bytes.value(samples) for r in rows)
        )
        if plan.schedule == "zero-bubble-h1":
            delayed = plan.in_flight[number] - least[number]
            need += delayed * sum(r.delayed_bytes.value(samples) for r in rows)
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


def test_a_deadline_ends_the_search_with_a_plan_and_a_bound():
    problem = random_problem(1, schedules=SCHEDULES, num_stages=None)
    best = solve_joint(problem)
    plan = solve_joint(evolve(problem, deadline_seconds=1e-9))
    assert not plan.complete
    assert plan.lower_bound <= best.step_seconds <= plan.step_seconds
    assert best.complete


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

    meshes = tuple(
        evolve(mesh, floors=tuple((LayerFloor(),) for _ in mesh.rows))
        for mesh in problem.menu.meshes
    )
    loose = evolve(problem, menu=evolve(problem.menu, meshes=meshes))
    # Equal layouts are the nearest.
    loose = evolve(loose, boundary_floor=lambda _, a, b, link: problem.boundary(a, 0, b, 0, link))
    try:
        before = solve_joint(loose)
    except InfeasibleError:
        return
    plan = solve_joint(evolve(loose, floors_at=floors_at))
    assert before.lower_bound == 0.0
    assert asked and len(set(asked)) == len(asked)
    assert plan.step_seconds == pytest.approx(before.step_seconds)
    assert 0.3 * best <= plan.lower_bound <= best * (1 + 1e-9)


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

    meshes = tuple(
        evolve(mesh, floors=tuple((LayerFloor(),) for _ in mesh.rows))
        for mesh in problem.menu.meshes
    )
    loose = evolve(problem, menu=evolve(problem.menu, meshes=meshes))
    loose = evolve(loose, boundary_floor=lambda _, a, b, link: problem.boundary(a, 0, b, 0, link))
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
            backward_input=Affine(min(inputs)),
            backward_weight=Affine(min(weights)),
            step_seconds=min(r.step_seconds for r in rows),
            state_bytes=min(r.state_bytes for r in rows),
            priced=tuple(
                PricedFloor(price=price, step_seconds=least(price)) for price in (0.0, 0.1, 1.0)
            ),
            kept=(
                KeptFloor(
                    activation_bytes=Affine(min(r.activation_bytes.value(samples) for r in rows))
                ),
            ),
        ),
    )


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
