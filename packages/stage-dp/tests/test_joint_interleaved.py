"""Interleaved pipelines of the joint search against all of them."""

import itertools
import math

import numpy as np
import pytest
from attrs import evolve

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
from stage_dp import InfeasibleError, device_bytes, order, pipeline_time, place, solve_joint
from stage_dp.menu_table import AskedFloors, MenuTable

NAME = "interleaved-1f1b"


def random_problem(seed):
    rng = np.random.default_rng(seed)
    hosts, devices = [(1, 2), (2, 1), (1, 4), (2, 2)][rng.integers(4)]
    layers, classes = int(rng.integers(4, 7)), int(rng.integers(1, 3))
    memory = 1e9 if seed % 3 == 0 else rng.uniform(8, 20)
    meshes = []
    for size in (1, 2):
        if size > devices:
            continue
        rows = tuple(
            tuple(
                LayerRow(
                    forward=Affine(0.0, rng.uniform(0.5, 1.0) / size),
                    backward_input=Affine(0.0, rng.uniform(0.5, 2.0) / size),
                    step_seconds=float(rng.choice([0.0, rng.uniform(0, 3)])),
                    state_bytes=rng.uniform(0, 2),
                    activation_bytes=Affine(0.0, rng.uniform(0, 1)),
                    transient_bytes=Affine(float(rng.choice([0.0, 1.0]))),
                )
                for _ in range(int(rng.integers(1, 3)))
            )
            for _ in range(classes)
        )
        meshes.append(
            MeshMenu(
                submesh=SubmeshSpec(num_hosts=1, devices_per_host=size),
                logical=LogicalMesh(axes=(MeshAxis(name="x", size=size),)),
                rows=rows,
            )
        )
    seconds = {"host": 0.1, "hosts": 0.4}
    return JointProblem(
        menu=LayerMenu(
            class_of_layer=tuple(int(c) for c in rng.integers(classes, size=layers)),
            meshes=tuple(meshes),
        ),
        batch_size=8,
        counts=(int(rng.choice([2, 4, 8])),),
        device_groups=(DeviceGroup(num_hosts=hosts, devices_per_host=devices, memory=memory),),
        boundary=lambda a, y, b, x, link: Affine(seconds[link]),
        schedules=(NAME,),
    )


def times(problem, stages, count, num_meshes):
    """Return the step time of (cuts, mesh, rows per layer), inf if it does not fit."""
    cuts, mesh, rows = stages
    samples = problem.batch_size // count
    menu, group = problem.menu.meshes[mesh], problem.device_groups[0]
    schedule = order(NAME, len(cuts) - 1, count, num_meshes=num_meshes)
    devices = place(problem.device_groups, [menu.submesh] * num_meshes)
    figures, alive, held, largest = [], [], [0.0] * num_meshes, [0.0] * num_meshes
    for s, (start, stop) in enumerate(itertools.pairwise(cuts)):
        own = [
            menu.rows[c][r]
            for c, r in zip(problem.menu.class_of_layer[start:stop], rows[start:stop], strict=True)
        ]
        figures.append(
            [
                sum(r.forward.value(samples) for r in own),
                sum(r.backward_input.value(samples) for r in own),
                sum(r.step_seconds for r in own),
            ]
        )
        at = s % num_meshes
        held[at] += sum(r.state_bytes for r in own)
        alive.append(sum(r.activation_bytes.value(samples) for r in own))
        largest[at] = max(largest[at], *(r.transient_bytes.value(samples) for r in own))
    kept = [most_alive(schedule.steps[m], alive) for m in range(num_meshes)]
    if max(map(sum, zip(held, kept, largest, strict=True))) > group.memory * (1 + 1e-12):
        return math.inf
    host = [device[0] // group.devices_per_host for device in devices]
    links = [
        "host" if host[s % num_meshes] == host[(s + 1) % num_meshes] else "hosts"
        for s in range(len(cuts) - 2)
    ]
    crossing = [problem.boundary(mesh, 0, mesh, 0, link).value(samples) for link in links]
    forward, backward, update = np.array(figures).T
    tail = [update[m::num_meshes].sum() for m in range(num_meshes)]
    return pipeline_time(schedule, forward, backward, crossing, tail).step_seconds


def most_alive(steps, activation):
    """Return the most bytes of activations that a mesh holds at one time."""
    change = {"forward": 1.0, "backward": -1.0}
    return max(itertools.accumulate(change[one.phase] * activation[one.stage] for one in steps))


def brute_force(problem):
    best = math.inf
    layers = problem.menu.num_layers
    total = problem.device_groups[0].num_hosts * problem.device_groups[0].devices_per_host
    for mesh, menu in enumerate(problem.menu.meshes):
        choices = list(
            itertools.product(*(range(len(menu.rows[c])) for c in problem.menu.class_of_layer))
        )
        for num_meshes in range(2, total // menu.submesh.num_devices + 1):
            for num in range(2 * num_meshes, min(4 * num_meshes, layers) + 1, num_meshes):
                for inner in itertools.combinations(range(1, layers), num - 1):
                    for rows in choices:
                        stages = ((0, *inner, layers), mesh, rows)
                        seconds = times(problem, stages, problem.counts[0], num_meshes)
                        best = min(best, seconds)
    return best


@pytest.mark.sample(seed=5)
@pytest.mark.parametrize("seed", range(24))
def test_interleaved_plans_are_near_the_best_and_above_their_bound(seed):
    problem = random_problem(seed)
    best = brute_force(problem)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_joint(problem)
        return
    plan = solve_joint(problem)
    assert plan.lower_bound <= best * (1 + 1e-9)
    cuts = [stage.layer_start for stage in plan.stages] + [problem.menu.num_layers]
    rows = [row for stage in plan.stages for row in stage.rows]
    again = times(
        problem, (cuts, plan.stages[0].mesh, rows), plan.num_microbatches, plan.num_meshes
    )
    assert plan.step_seconds == pytest.approx(again, rel=1e-9)
    assert plan.step_seconds <= 1.06 * best


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(10))
def test_floors_that_counts_share_stay_below_all_interleaved_pipelines(seed):
    problem = evolve(random_problem(seed), counts=(2, 4))
    best = min(brute_force(evolve(problem, counts=(count,))) for count in problem.counts)
    if math.isinf(best):
        return
    asked = []

    def floors_at(mesh, number, samples):
        asked.append((mesh, number, samples))
        count = problem.batch_size // samples
        rows = problem.menu.meshes[mesh].rows[number]
        work = [
            count * (r.forward.value(samples) + r.backward_input.value(samples)) + r.step_seconds
            for r in rows
        ]
        least = loosest(rows)
        return (
            evolve(
                least,
                state_bytes=min(r.state_bytes for r in rows),
                priced=(PricedFloor(step_seconds=min(work)),),
            ),
        )

    meshes = tuple(
        evolve(mesh, floors=tuple((loosest(rows),) for rows in mesh.rows))
        for mesh in problem.menu.meshes
    )
    floored = evolve(problem, menu=evolve(problem.menu, meshes=meshes), floors_at=floors_at)
    plan = solve_joint(floored)
    assert 0.3 * best <= plan.lower_bound <= best * (1 + 1e-9)
    assert len(set(asked)) == len(asked)
    crossed = solve_joint(
        evolve(
            floored, boundary_floor=lambda number, a, b, link: problem.boundary(a, 0, b, 0, link)
        )
    )
    assert plan.lower_bound * (1 - 1e-9) <= crossed.lower_bound <= best * (1 + 1e-9)


def long_problem(seed):
    """Return a problem of some twenty layers, whose cuts are moved to and fro."""
    rng, few = np.random.default_rng(seed), random_problem(seed)
    layers, classes = int(rng.integers(14, 26)), len(few.menu.meshes[0].rows)
    class_of_layer = tuple(int(c) for c in rng.integers(classes, size=layers))
    group = DeviceGroup(num_hosts=2, devices_per_host=2, memory=rng.uniform(20, 60))
    menu = evolve(few.menu, class_of_layer=class_of_layer)
    return evolve(few, menu=menu, counts=(8,), device_groups=(group,), proof=False)


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", [31, 96, 99])
def test_a_known_pipeline_hides_none_that_moved_cuts_lead_to(seed):
    problem = long_problem(seed)
    (group,) = problem.device_groups
    more = evolve(problem, device_groups=(evolve(group, memory=1.04 * group.memory),))
    known = solve_joint(problem)
    found = solve_joint(more)
    assert found.step_seconds < known.step_seconds
    assert solve_joint(more, known).step_seconds == pytest.approx(found.step_seconds, rel=1e-12)


def test_chosen_rows_fit_at_every_moment_and_no_more_is_kept_free():
    free = []
    for seed in range(14):
        problem = evolve(long_problem(seed), schedules=("interleaved-1f1b",))
        (group,) = problem.device_groups
        try:
            found = solve_joint(problem)
        except InfeasibleError:
            continue
        assert max(device_bytes(found)) <= group.memory * (1 + 1e-9)
        apart = [0.0] * found.num_meshes  # with the most of every chunk, at whatever time
        alone = order(found.schedule, len(found.stages), 8, num_meshes=found.num_meshes)
        for k, (stage, peak) in enumerate(zip(found.stages, found.peak_bytes, strict=True)):
            more = (alone.in_flight(k) - found.in_flight[k]) * stage.activation_bytes
            apart[k % found.num_meshes] += peak - stage.transient_bytes + more
        free.append(max(apart) > group.memory)
    assert len(free) > 5 and any(free)


def loosest(rows):
    """Return a floor of all rows with half of their seconds."""

    def each(name):
        return Affine(0.0, min(getattr(r, name).each for r in rows) / 2)

    forward, backward = each("forward"), each("backward_input")
    both = Affine(0.0, forward.each + backward.each)
    return LayerFloor(seconds=both, forward=forward, forward_and_input=both, backward=backward)


def test_floors_asked_for_at_one_count_serve_its_multiples():
    floor = LayerFloor(seconds=Affine(0.0, 0.5), kept=(KeptFloor(seconds=Affine(0.0, 0.3)),))
    sharp = evolve(
        floor,
        priced=(PricedFloor(seconds=Affine(0.0, 1.0)),),
        kept=(KeptFloor(seconds=Affine(0.0, 0.1)),),  # beside the priced ones
        state_bytes=2.0,
    )
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        rows=((LayerRow(forward=Affine(0.0, 1.0), backward_input=Affine(), state_bytes=2.0),),),
        floors=((floor,),),
    )
    problem = JointProblem(
        menu=LayerMenu(class_of_layer=(0,), meshes=(mesh,)),
        batch_size=12,
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=1, memory=9.0),),
        floors_at=lambda mesh, number, samples: (sharp,),
    )
    shared: AskedFloors = {}
    two, three, six = (MenuTable(problem, count, shared) for count in (2, 3, 6))
    assert two.ask(0, 0) and not two.ask(0, 0)
    assert not three.take_over(0, 0)  # 2 does not divide 3: its microbatches may have other ways
    assert six.take_over(0, 0) and not six.take_over(0, 0)
    (taken,) = six.floors(0, 0)
    # B t + u of 12 samples, whatever B.
    assert (taken.priced[0].step_seconds, taken.state_bytes) == (12.0, 2.0)
    assert taken.kept == sharp.kept
    assert six.ask(0, 0) and six.floors(0, 0) == (sharp,)


@pytest.mark.parametrize(("crossing", "num_stages"), [(0.0, 12), (1.0, 4)])
def test_six_stages_per_mesh_are_found_where_transfers_cost_little(crossing, num_stages):
    row = LayerRow(forward=Affine(0.0, 1.0), backward_input=Affine(0.0, 2.0))
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=1),)),
        rows=((row,),),
    )
    problem = JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * 12, meshes=(mesh,)),
        batch_size=2,
        counts=(2,),
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=2, memory=1e9),),
        boundary=lambda a, y, b, x, link: Affine(crossing),
        schedules=(NAME,),
    )
    assert len(solve_joint(problem).stages) == num_stages
