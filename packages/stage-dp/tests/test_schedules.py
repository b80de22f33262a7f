"""Schedules run without waiting for themselves, and hold as many microbatches as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_dp import (
    SCHEDULE_RULES,
    SCHEDULES,
    Step,
    adaptive_warmups,
    default_warmups,
    order,
    pipeline_time,
)


def test_1f1b_of_two_stages_and_three_microbatches():
    schedule = order("1f1b", 2, 3)
    shown = [" ".join(f"{s.phase[0]}{s.microbatch}" for s in steps) for steps in schedule.steps]
    assert shown == ["f0 f1 b0 f2 b1 b2", "f0 b0 f1 b1 f2 b2"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        ("eager-1f1b", [7, 5, 3, 1]),
        ("sequential", [1, 1, 1, 1]),
    ],
)
def test_microbatches_in_flight_of_four_stages_and_eight_microbatches(name, counts):
    schedule = order(name, 4, 8)
    assert [schedule.in_flight(stage) for stage in range(4)] == counts
    assert list(default_warmups(name, 4, 8)) == counts


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    meshes=st.integers(1, 5),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 12),
    seconds=st.lists(st.floats(0, 3), min_size=14, max_size=14),
)
def test_every_step_is_there_once_and_after_what_it_reads(
    name, meshes, chunks, microbatches, seconds
):
    stages = meshes * chunks if name == "interleaved-1f1b" else meshes
    warmups = None
    if name == "adaptive":
        warmups = adaptive_warmups(seconds[: stages - 1], 1.0, microbatches)
    schedule = order(
        name,
        stages,
        microbatches,
        num_meshes=meshes if name == "interleaved-1f1b" else None,
        warmups=warmups,
    )
    steps = schedule.global_order()
    rule = SCHEDULE_RULES[name]
    per_microbatch = 1 + rule.has_backward + rule.splits_backward
    assert len(steps) == len(set(steps)) == per_microbatch * stages * microbatches
    place = {step: at for at, step in enumerate(steps)}
    for step in steps:
        if step.phase == "backward_weight":
            by_input = Step(phase="backward_input", stage=step.stage, microbatch=step.microbatch)
            assert place[step] > place[by_input]
        elif step.phase != "forward":
            assert (
                place[step]
                > place[Step(phase="forward", stage=step.stage, microbatch=step.microbatch)]
            )
            if step.stage + 1 < stages:
                later = Step(phase=step.phase, stage=step.stage + 1, microbatch=step.microbatch)
                assert place[step] > place[later]
        elif step.stage:
            before = Step(phase="forward", stage=step.stage - 1, microbatch=step.microbatch)
            assert place[step] > place[before]
    for mesh, own in enumerate(schedule.steps):
        assert [s for s in steps if schedule.mesh_of(s.stage) == mesh] == list(own)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (3, 12), (2, 2), (1, 4)])
def test_zero_bubble_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(n, m):
    # m (f + b + w) + (n-1) (f + b - w) with f = b = w = 1 (Qi et al. 2023, Table 2).
    times = ([1.0] * n, [2.0] * n)
    schedule = order("zero-bubble-h1", n, m)
    step = pipeline_time(schedule, *times, weight=[1.0] * n).step_seconds
    assert step == pytest.approx(3 * m + n - 1)
    assert {schedule.in_flight(stage) for stage in range(n)} == {min(n, m)}
    assert min(n, m) == order("1f1b", n, m).in_flight(0)


def test_zero_bubble_h1_with_the_memory_of_1f1b_on_each_stage_lies_between():
    n, m = 4, 8
    times = ([1.0] * n, [2.0] * n)
    least = default_warmups("zero-bubble-h1", n, m)
    schedule = order("zero-bubble-h1", n, m, warmups=least)
    assert [schedule.in_flight(stage) for stage in range(n)] == [4, 3, 2, 1]
    assert pipeline_time(schedule, *times, weight=[1.0] * n).step_seconds == 3 * m + 2 * (n - 1)
    assert pipeline_time(order("1f1b", n, m), *times).step_seconds == 3 * m + 3 * (n - 1)


def test_interleaving_shortens_the_bubble():
    # 4 meshes, 8 microbatches, 3 s of work per mesh and microbatch, cut into 1 or 2 stages.
    plain = pipeline_time(order("1f1b", 4, 8), [1.0] * 4, [2.0] * 4).step_seconds
    halves = pipeline_time(
        order("interleaved-1f1b", 8, 8, num_meshes=4), [0.5] * 8, [1.0] * 8
    ).step_seconds
    assert plain == pytest.approx(8 * 3 + 3 * 3)
    assert halves == pytest.approx(8 * 3 + 3 * 1.5)


@pytest.mark.parametrize(
    ("crossing", "lazy", "eager", "adaptive"),
    [(0.1, 1.058, 1.007, 1.007), (0.5, 1.291, 1.033, 1.033), (1.0, 1.582, 1.066, 1.066),
     (1.5, 1.873, 1.099, 1.099), (3.0, 2.746, 1.606, 1.197)],
)  # fmt: skip
def test_makespans_of_the_resharding_paper_model(crossing, lazy, eager, adaptive):
    """8 stages, 64 microbatches, forward 1 s, backward 2 s, over the time without any waiting."""
    n, m = 8, 64
    ideal = 3 * (m + n - 1)
    times = ([1.0] * n, [2.0] * n, [crossing] * (n - 1))
    assert pipeline_time(order("1f1b", n, m), *times).step_seconds / ideal == pytest.approx(
        lazy, abs=1.5e-3
    )
    assert pipeline_time(order("eager-1f1b", n, m), *times).step_seconds / ideal == pytest.approx(
        eager, abs=1.5e-3
    )
    warmups = adaptive_warmups(times[2], 3.0, m)
    assert pipeline_time(
        order("adaptive", n, m, warmups=warmups), *times
    ).step_seconds / ideal == pytest.approx(adaptive, abs=1.5e-3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "adaptive"])
@pytest.mark.parametrize("crossing", [0.5, 1.25, 2.0, 4.0, 10.0])
def test_the_pace_of_a_schedule_is_the_time_between_microbatches_of_two_equal_stages(
    name, crossing
):
    rule = SCHEDULE_RULES[name]
    assert rule.pace is not None
    seconds = []
    for m in (60, 120):
        warmups = adaptive_warmups([crossing], 3.0, m) if name == "adaptive" else None
        schedule = order(name, 2, m, warmups=warmups)
        seconds.append(pipeline_time(schedule, [1.0] * 2, [2.0] * 2, [crossing]).step_seconds)
    pace = rule.pace(*(np.array(one) for one in (1.0, 2.0, crossing)))
    assert (seconds[1] - seconds[0]) / 60 == pytest.approx(float(pace))


def test_adaptive_is_eager_only_at_slow_boundaries():
    # One boundary of 1 s beside stages of 3 s: 2 * 1 / 3 rounds up to one more microbatch.
    assert adaptive_warmups([0.0, 1.0, 0.0], 3.0, 16) == (5, 4, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "schedule must be one of"),
        (("1f1b", 0, 2), "at least one stage"),
        (("adaptive", 2, 2), "warmups"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        order(*arguments)


def test_warmups_that_would_deadlock_are_refused():
    with pytest.raises(ValueError, match="forwards that never come"):
        order("1f1b", 2, 4, warmups=(1, 2))
    with pytest.raises(ValueError, match="needs at least .2, 1. microbatches in flight"):
        order("zero-bubble-h1", 2, 4, warmups=(1, 1))
    with pytest.raises(ValueError, match="multiple of num_meshes"):
        order("interleaved-1f1b", 5, 4, num_meshes=2)


def test_token_slices_take_the_place_of_their_microbatch():
    schedule = order("1f1b", 2, 2, num_slices=2)
    shown = [
        " ".join(f"{s.phase[0]}{s.microbatch}{'ab'[s.slice_index]}" for s in steps)
        for steps in schedule.steps
    ]
    assert shown == [
        "f0a f0b f1a f1b b0b b0a b1b b1a",
        "f0a f0b b0b b0a f1a f1b b1b b1a",
    ]
    assert [schedule.in_flight(stage) for stage in range(2)] == [2, 1]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "adaptive"])
@pytest.mark.parametrize("slices", [2, 3])
def test_schedules_of_token_slices_do_not_wait_for_themselves(name, slices):
    schedule = order(name, 4, 4, num_meshes=2 if "interleaved" in name else None, num_slices=slices)
    steps = schedule.global_order()
    assert len(set(steps)) == len(steps) == sum(map(len, schedule.steps))
