"""Submeshes are packed where they fit and only there, near their neighbours."""

import itertools
import math
import random

import pytest

from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from stage_dp import place, solve_joint
from stage_dp.device_pool import DevicePool, nested


def fit(groups, submeshes):
    """Return whether submeshes fit, by trying all hosts for each."""
    free = [[g.devices_per_host] * g.num_hosts for g in groups]

    def attempt(at):
        if at == len(submeshes):
            return True
        s = submeshes[at]
        room = free[s.host_group]
        for hosts in itertools.combinations(range(len(room)), s.num_hosts):
            if all(room[h] >= s.devices_per_host for h in hosts):
                for h in hosts:
                    room[h] -= s.devices_per_host
                found = attempt(at + 1)
                for h in hosts:
                    room[h] += s.devices_per_host
                if found:
                    return True
        return False

    return attempt(0)


def random_case(rng):
    groups = tuple(
        DeviceGroup(num_hosts=rng.randint(1, 3), devices_per_host=rng.randint(1, 4), memory=1.0)
        for _ in range(rng.choice([1, 1, 2]))
    )
    submeshes = []
    for _ in range(rng.randint(1, 5)):
        g = rng.randrange(len(groups))
        submeshes.append(
            SubmeshSpec(
                num_hosts=rng.randint(1, groups[g].num_hosts),
                devices_per_host=rng.randint(1, groups[g].devices_per_host),
                host_group=g,
            )
        )
    return groups, submeshes


@pytest.mark.sample(seed=50)
@pytest.mark.parametrize("seed", range(200))
def test_placing_and_counting_agree_with_trying_everything(seed):
    groups, submeshes = random_case(random.Random(seed))
    possible = fit(groups, submeshes)
    kinds = list(dict.fromkeys(submeshes))
    pool = DevicePool(groups, kinds)
    states = {0}
    for s in submeshes:
        row = pool.following[kinds.index(s)]
        states = {int(r) for state in states for r in row[state]} - {pool.dead}
    assert bool(states) == possible
    if not possible:
        with pytest.raises(ValueError, match="do not fit together"):
            place(groups, submeshes)
        return
    placed = place(groups, submeshes)
    used = [d for devices in placed for d in devices]
    assert len(used) == len(set(used))
    first = list(
        itertools.accumulate((g.num_hosts * g.devices_per_host for g in groups), initial=0)
    )
    for s, devices in zip(submeshes, placed, strict=True):
        per_host = groups[s.host_group].devices_per_host
        local = [d - first[s.host_group] for d in devices]
        assert all(0 <= d < first[s.host_group + 1] - first[s.host_group] for d in local)
        hosts = [d // per_host for d in local]
        assert hosts == sorted(hosts)
        assert sorted(hosts.count(h) for h in set(hosts)) == [s.devices_per_host] * s.num_hosts


def fewest_crossings(groups, submeshes):
    """Return how many neighbours are not on one host together at least, by trying all hosts."""
    free = [[g.devices_per_host] * g.num_hosts for g in groups]

    def least(at, before):
        if at == len(submeshes):
            return 0
        s, found = submeshes[at], math.inf
        room = free[s.host_group]
        for hosts in itertools.combinations(range(len(room)), s.num_hosts):
            if all(room[h] >= s.devices_per_host for h in hosts):
                here = {(s.host_group, h) for h in hosts}
                for h in hosts:
                    room[h] -= s.devices_per_host
                crossed = at > 0 and len(here | before) > 1
                found = min(found, crossed + least(at + 1, here))
                for h in hosts:
                    room[h] += s.devices_per_host
        return found

    return least(0, set())


@pytest.mark.sample(seed=40)
@pytest.mark.parametrize("seed", range(200))
def test_no_more_stages_fill_a_host_than_boundaries_cross_hosts_wherever_stages_are(seed):
    rng = random.Random(seed)
    groups = tuple(
        DeviceGroup(num_hosts=rng.randint(1, 3), devices_per_host=rng.choice([2, 4]), memory=1.0)
        for _ in range(rng.choice([1, 1, 2]))
    )
    submeshes = []
    for _ in range(rng.randint(2, 6)):
        g = rng.randrange(len(groups))
        per_host = groups[g].devices_per_host
        hosts = rng.randint(1, groups[g].num_hosts)
        sizes = [d for d in (1, 2, 4) if d <= per_host] if hosts == 1 else [per_host]
        submeshes.append(
            SubmeshSpec(num_hosts=hosts, devices_per_host=rng.choice(sizes), host_group=g)
        )
    fewest = fewest_crossings(groups, submeshes)
    if math.isinf(fewest):
        return
    kinds = list(dict.fromkeys(submeshes))
    pool = DevicePool(groups, kinds)
    state, filled = 0, 0
    for s in submeshes[:-1]:
        kind = kinds.index(s)
        filled += bool(pool.fills[kind, state])
        state = int(pool.following[kind][state, 0])
    assert filled <= fewest
    parts = [s.num_devices for s in submeshes]
    if len(groups) == 1 and max(parts) <= groups[0].devices_per_host:
        assert filled == sum(parts[:-1]) // groups[0].devices_per_host


def test_powers_of_two_are_nested_and_three_of_eight_is_not():
    group = DeviceGroup(num_hosts=4, devices_per_host=8, memory=1.0)

    def kinds(*sizes):
        return [SubmeshSpec(num_hosts=h, devices_per_host=d) for h, d in sizes]

    assert nested(group, kinds((1, 1), (1, 4), (2, 8)))
    assert not nested(group, kinds((1, 3)))
    assert not nested(group, kinds((2, 4)))


def test_neighbouring_stages_share_a_host_where_they_can():
    groups = (DeviceGroup(num_hosts=2, devices_per_host=4, memory=1.0),)
    half = SubmeshSpec(num_hosts=1, devices_per_host=2)
    assert place(groups, [half] * 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    whole = SubmeshSpec(num_hosts=1, devices_per_host=4)
    assert place(groups, [half, whole, half]) == ((0, 1), (4, 5, 6, 7), (2, 3))


def test_devices_of_the_second_group_are_numbered_after_the_first():
    groups = (
        DeviceGroup(num_hosts=1, devices_per_host=4, memory=1.0),
        DeviceGroup(num_hosts=2, devices_per_host=2, memory=1.0),
    )
    both = SubmeshSpec(num_hosts=2, devices_per_host=2, host_group=1)
    assert place(groups, [both]) == ((4, 5, 6, 7),)


def test_too_many_states_are_counted_instead():
    groups = (DeviceGroup(num_hosts=12, devices_per_host=8, memory=1.0),)
    kinds = [SubmeshSpec(num_hosts=1, devices_per_host=d) for d in (1, 3, 5)]
    pool = DevicePool(groups, kinds)
    assert not pool.exact
    assert pool.num_states <= 97


def test_an_unknown_host_group_is_refused():
    with pytest.raises(ValueError, match="only 1 device groups"):
        DevicePool(
            (DeviceGroup(num_hosts=1, devices_per_host=1, memory=1.0),),
            [SubmeshSpec(num_hosts=1, devices_per_host=1, host_group=1)],
        )


def test_the_bound_counts_each_device_of_several_groups():
    def mesh(group, hosts, devices):
        speed = (1.0, 2.5)[group] * hosts * devices
        row = LayerRow(
            forward=Affine(0.0, 1 / speed),
            backward_input=Affine(0.0, 1 / speed),
            backward_weight=Affine(0.0, 1 / speed),
            step_seconds=0.0,
            state_bytes=0.0,
            activation_bytes=Affine(0.0, 0.0),
            delayed_bytes=Affine(0.0, 0.0),
            transient_bytes=Affine(0.0, 0.0),
            batch_split=1,
            layout_in=0,
            layout_out=0,
        )
        return MeshMenu(
            submesh=SubmeshSpec(num_hosts=hosts, devices_per_host=devices, host_group=group),
            logical=LogicalMesh(axes=(MeshAxis(name="x", size=hosts * devices),)),
            rows=((row,),),
            layouts=("a",),
        )

    shapes = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]
    meshes = tuple(mesh(group, *shape) for group in (0, 1) for shape in shapes)
    problem = JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * 28, meshes=meshes),
        batch_size=256,
        device_groups=(DeviceGroup(num_hosts=2, devices_per_host=8, memory=1.0),) * 2,
        counts=(256,),
        schedules=("1f1b",),
    )
    plan = solve_joint(problem)
    assert plan.lower_bound > 0.98 * plan.step_seconds
