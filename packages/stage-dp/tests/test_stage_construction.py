"""Stage construction against brute force over all plans, and its errors."""

import itertools
import math
import random

import pytest
from attrs import evolve

from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup, StageCandidate, StageProblem
from stage_dp import (
    InfeasibleError,
    in_flight_counts,
    peak_bytes,
    place,
    solve_stages,
    step_seconds,
)

SPLIT = "zero-bubble-h1"


def candidate(start, stop, hosts, devices, seconds, *, microbatches=4, group=0, **more):
    submesh = SubmeshSpec(num_hosts=hosts, devices_per_host=devices, host_group=group)
    more.setdefault("lower_bound_seconds", seconds)
    return StageCandidate(
        layer_start=start,
        layer_stop=stop,
        submesh=submesh,
        logical=LogicalMesh(axes=(MeshAxis(name="data", size=submesh.num_devices),)),
        num_microbatches=microbatches,
        forward_seconds=seconds / 3,
        backward_seconds=seconds * 2 / 3,
        **more,
    )


def random_problem(rng, *, tight=True, **changes):
    groups = tuple(
        DeviceGroup(
            num_hosts=rng.choice([1, 2, 3]), devices_per_host=rng.choice([1, 2, 3, 4]), memory=10.0
        )
        for _ in range(rng.choice([1, 1, 2]))
    )
    layers = rng.randint(1, 4)
    kinds = [
        (hosts, devices, g)
        for g, group in enumerate(groups)
        for hosts in range(1, group.num_hosts + 1)
        for devices in range(1, group.devices_per_host + 1)
        if rng.random() < 0.6
    ] or [(1, 1, 0)]
    candidates: list[StageCandidate] = []
    for start, stop in itertools.combinations(range(layers + 1), 2):
        for hosts, devices, g in kinds:
            for m in (2, 5):
                for _ in range(rng.choice([0, 1, 1, 2])):
                    seconds = (stop - start) * rng.uniform(0.5, 1.5) / (hosts * devices) ** 0.8
                    candidates.append(
                        candidate(
                            start, stop, hosts, devices, seconds * 2 / m, microbatches=m, group=g,
                            step_seconds=rng.choice([0.0, rng.uniform(0, 0.5)]),
                            boundary_seconds=rng.choice([0.0, rng.uniform(0, 0.3)]),
                            state_bytes=rng.uniform(1, 9) if tight else 0.0,
                            activation_bytes=rng.uniform(0, 3) if tight else 0.0,
                            delayed_bytes=(len(candidates) % 3) / 2 if tight else 0.0,
                            waiting_bytes=(None, 0.5)[len(candidates) % 2] if tight else 0.0,
                            transient_bytes=rng.uniform(0, 1),
                            backward_weight_seconds=seconds / m * (len(candidates) % 5) / 4,
                            lower_bound_seconds=seconds * 2 / m * rng.uniform(0.7, 1.0),
                        )
                    )  # fmt: skip
    if not candidates:
        candidates = [candidate(0, layers, 1, 1, 1.0)]
    rng.shuffle(candidates)
    arguments = {
        "num_layers": layers,
        "device_groups": groups,
        "candidates": tuple(candidates[:60]),
        "schedules": tuple(
            rng.sample(["1f1b", "gpipe", "eager-1f1b", "sequential", "adaptive", SPLIT], 2)
        ),
    }
    return StageProblem(**{**arguments, **changes})


def all_plans(problem):
    """Yield every chain of candidates with one microbatch count that can be placed."""

    def extend(chain, layer):
        if layer == problem.num_layers:
            yield tuple(chain)
            return
        for c in problem.candidates:
            if c.layer_start == layer and (
                not chain or c.num_microbatches == chain[0].num_microbatches
            ):
                yield from extend([*chain, c], c.layer_stop)

    total = sum(g.num_hosts * g.devices_per_host for g in problem.device_groups)
    for chain in extend([], 0):
        if problem.num_stages not in (None, len(chain)):
            continue
        if problem.use_all_devices and sum(c.submesh.num_devices for c in chain) != total:
            continue
        try:
            place(problem.device_groups, [c.submesh for c in chain])
        except ValueError:
            continue
        yield chain


def fits(problem, chain, schedule):
    return all(
        peak_bytes(c, k, schedule == SPLIT) <= problem.device_groups[c.submesh.host_group].memory
        for c, k in zip(chain, in_flight_counts(chain, schedule), strict=True)
    )


def held(problem, chain, schedule):
    """Return the microbatches in flight on each stage: as many as are of use and fit."""
    counts = list(in_flight_counts(chain, schedule))
    if schedule == SPLIT:
        for k, c in enumerate(chain):
            memory = problem.device_groups[c.submesh.host_group].memory
            least = counts[k]
            while counts[k] < counts[0] and peak_bytes(c, counts[k] + 1, counts[k] + 2 - least) <= (
                memory
            ):
                counts[k] += 1
    return counts


def estimate(chain, schedule):
    """Return the objective of the recurrence, written out."""
    num = chain[0].num_microbatches
    total, slowest = 0.0, 0.0
    for k, c in enumerate(chain):
        crossing = c.boundary_seconds if k + 1 < len(chain) else 0.0
        t = c.seconds
        pace = {
            "1f1b": t + crossing,
            SPLIT: t + crossing,
            "eager-1f1b": max(t, crossing, (t + crossing) * 2 / 3),
            "adaptive": max(t, crossing),
            "gpipe": max(c.forward_seconds, crossing) + max(c.backward_seconds, crossing),
            "sequential": 0.0,
        }[schedule]
        later = c.backward_weight_seconds if schedule == SPLIT else 0.0
        path = max(t - 2 * later, 0.0) + 2 * crossing
        total += path * (num if schedule == "sequential" else 1)
        slowest = max(slowest, (num - 1) * pace + 2 * later + c.step_seconds)
    return total + slowest


@pytest.mark.sample(seed=40)
@pytest.mark.parametrize("seed", range(120))
def test_random_problems_against_all_plans(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, tight=seed % 4 != 0, use_all_devices=seed % 5 == 2)
    if seed % 3 == 1:
        problem = evolve(problem, num_stages=rng.randint(1, problem.num_layers))
    scored = [
        (
            step_seconds(chain, schedule, held(problem, chain, schedule)),
            estimate(chain, schedule),
            schedule,
            chain,
        )
        for chain in all_plans(problem)
        for schedule in problem.schedules
        if fits(problem, chain, schedule)
    ]
    if not scored:
        with pytest.raises(InfeasibleError):
            solve_stages(problem)
        return
    plan = solve_stages(problem)
    chain = tuple(stage.candidate for stage in plan.stages)
    assert fits(problem, chain, plan.schedule)
    assert list(plan.in_flight) == held(problem, chain, plan.schedule)
    exact = step_seconds(chain, plan.schedule, plan.in_flight)
    assert plan.step_seconds == pytest.approx(exact)
    best = min(item[0] for item in scored)
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert plan.lower_bound <= plan.step_seconds
    # The plan with the least estimate, of each microbatch count and schedule, was scored.
    for key in {(item[2], item[3][0].num_microbatches) for item in scored}:
        same = [i for i in scored if (i[2], i[3][0].num_microbatches) == key]
        least = min(i[1] for i in same)
        assert plan.step_seconds <= max(i[0] for i in same if i[1] <= least * (1 + 1e-9)) + 1e-12
    assert plan.step_seconds <= best * 1.05
    devices = [d for stage in plan.stages for d in stage.device_ids]
    assert len(devices) == len(set(devices))


def test_packing_refuses_three_submeshes_of_two_devices_on_hosts_of_three():
    # 2 hosts of 3 devices have 6 devices, but only two submeshes of 2 fit.
    groups = (DeviceGroup(num_hosts=2, devices_per_host=3, memory=1.0),)
    candidates = [candidate(k, k + 1, 1, 2, 1.0) for k in range(3)]
    candidates.append(candidate(0, 3, 1, 3, 5.0))
    problem = StageProblem(num_layers=3, device_groups=groups, candidates=tuple(candidates))
    assert len(solve_stages(problem).stages) == 1


def test_idle_devices_are_allowed_unless_forbidden():
    groups = (DeviceGroup(num_hosts=1, devices_per_host=4, memory=1.0),)
    fast, slow = candidate(0, 1, 1, 2, 1.0), candidate(0, 1, 1, 4, 2.0)
    problem = StageProblem(num_layers=1, device_groups=groups, candidates=(fast, slow))
    assert solve_stages(problem).stages[0].device_ids == (0, 1)
    everything = StageProblem(
        num_layers=1, device_groups=groups, candidates=(fast, slow), use_all_devices=True
    )
    assert solve_stages(everything).stages[0].device_ids == (0, 1, 2, 3)


def test_memory_depends_on_the_schedule():
    # Two stages, 8 microbatches: 1f1b holds 2 and 1 microbatches, gpipe 8 of 1 byte each.
    groups = (DeviceGroup(num_hosts=1, devices_per_host=2, memory=5.0),)
    more = {"microbatches": 8, "activation_bytes": 1.0, "state_bytes": 2.0}
    candidates = (candidate(0, 1, 1, 1, 1.0, **more), candidate(1, 2, 1, 1, 1.0, **more))
    problem = StageProblem(
        num_layers=2, device_groups=groups, candidates=candidates, schedules=("gpipe", "1f1b")
    )
    plan = solve_stages(problem)
    assert plan.schedule == "1f1b"
    assert plan.peak_bytes == (4.0, 3.0)
    assert plan.step_seconds == pytest.approx(9.0)
    only = StageProblem(
        num_layers=2, device_groups=groups, candidates=candidates, schedules=("gpipe",)
    )
    with pytest.raises(InfeasibleError, match="5 bytes per device over") as caught:
        solve_stages(only)
    assert caught.value.missing_bytes == pytest.approx(5.0)
    assert "'1f1b'" in caught.value.remedy


def test_stages_left_free_are_the_remedy_where_they_fit():
    # One stage of both layers holds 6 bytes of state on one device, two stages 3 on each.
    groups = (DeviceGroup(num_hosts=1, devices_per_host=2, memory=5.0),)
    candidates = tuple(
        candidate(start, stop, 1, 1, 1.0, microbatches=1, activation_bytes=1.0, state_bytes=state)
        for start, stop, state in ((0, 2, 6.0), (0, 1, 3.0), (1, 2, 3.0))
    )
    problem = StageProblem(num_layers=2, device_groups=groups, candidates=candidates)
    assert solve_stages(problem).num_meshes == 2
    with pytest.raises(InfeasibleError) as caught:
        solve_stages(evolve(problem, num_stages=1, use_all_devices=False))
    assert "leave num_stages free" in caught.value.remedy


def test_a_layer_without_candidates_is_named():
    groups = (DeviceGroup(num_hosts=1, devices_per_host=2, memory=5.0),)
    problem = StageProblem(
        num_layers=2, device_groups=groups, candidates=(candidate(0, 1, 1, 1, 1.0),)
    )
    with pytest.raises(InfeasibleError, match=r"no candidate covers layers \[1\]"):
        solve_stages(problem)


def test_searched_schedules_only():
    groups = (DeviceGroup(num_hosts=1, devices_per_host=2, memory=5.0),)
    problem = StageProblem(
        num_layers=1,
        device_groups=groups,
        candidates=(candidate(0, 1, 1, 1, 1.0),),
        schedules=("forward-only",),
    )
    with pytest.raises(ValueError, match="must be among"):
        solve_stages(problem)


def test_step_time_without_transfers_is_alpas_formula_for_equal_stages():
    chain = [candidate(k, k + 1, 1, 1, 3.0, microbatches=8) for k in range(4)]
    assert step_seconds(chain, "1f1b") == pytest.approx(4 * 3 + 7 * 3)
    assert math.isclose(step_seconds(chain, "sequential"), 8 * 12)
