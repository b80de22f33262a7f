import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpa_interchange.reshard import PlacedTensor, ReshardingPlan, ReshardingTask
from alpa_interchange.schedule import Instruction, PipelineSchedule
from alpa_interchange.tensor import ShardingSpec, TensorType
from cost_model import simulate


def longest_path(schedule, seconds, transfer):
    """Return the step time by relaxing a graph of all runs until nothing changes: the oracle.

    A run waits for the run before it on its mesh and for the producers of its inputs; a transfer
    waits for its producer and for the transfer before it on the same channel.
    """
    runs, producer = {}, {}
    sends: dict[tuple[int, int], list[str]] = {}
    for mesh, program in enumerate(schedule.programs):
        for position, instruction in enumerate(program):
            if instruction.kind == "run":
                runs[mesh, position] = instruction
                for name in instruction.outputs:
                    producer[mesh, name] = (mesh, position)
            elif instruction.kind == "send":
                sends.setdefault((mesh, instruction.peer), []).extend(instruction.inputs)
    ends = dict.fromkeys(runs, 0.0)
    arrivals = {}
    for _ in range(len(runs) + 1):
        for (source, target), names in sends.items():
            free = 0.0
            for name in names:
                free = max(free, ends[producer[source, name]]) + transfer
                arrivals[target, name] = free
        before = dict(ends)
        for mesh, program in enumerate(schedule.programs):
            free = 0.0
            for position, instruction in enumerate(program):
                if instruction.kind == "run":
                    start = free
                    for name in instruction.inputs:
                        local = producer.get((mesh, name))
                        arrival = ends[local] if local else arrivals.get((mesh, name), 0.0)
                        start = max(start, arrival)
                    free = ends[mesh, position] = start + seconds[instruction.task]
        if before == ends:
            break
    return max(ends.values())


def test_a_pipeline_without_transfer_time_takes_microbatches_plus_stages_minus_one_slots(
    pipeline, stage_seconds
):
    result = simulate(pipeline(4, 8, lambda stage: 4 - stage), stage_seconds(4))
    assert result.step_seconds == (8 + 4 - 1) * 3
    assert result.busy_seconds == (24.0,) * 4
    assert result.bubble_seconds == (9.0,) * 4


# makespan over ideal of 8 stages, 64 microbatches, f = 1, b = 2: three ways to run 1F1B, by the
# steady-state law  T = max over i <= l of ((l - i + 1)(f + b) + 2 sum c) / (k_i - k_l + 1)
@pytest.mark.parametrize(
    ("transfer", "blocked", "one_f_one_b", "eager"),
    [
        (0.1, 1.065, 1.058, 1.007),
        (0.5, 1.326, 1.291, 1.033),
        (1.0, 1.653, 1.582, 1.066),
        (3.0, 2.958, 2.746, 1.606),
    ],
)
def test_slow_boundaries_cost_what_the_steady_state_law_says(
    pipeline, stage_seconds, transfer, blocked, one_f_one_b, eager
):
    seconds = stage_seconds(8)
    usual = pipeline(8, 64, lambda stage: 8 - stage)
    early = pipeline(8, 64, lambda stage: 2 * (8 - stage) - 1)

    def ratio(schedule, blocking=False):
        done = simulate(schedule, seconds, lambda *_: transfer, blocking=blocking)
        return done.step_seconds / ((64 + 8 - 1) * 3)

    assert ratio(usual, blocking=True) == pytest.approx(blocked, abs=6e-4)
    assert ratio(usual) == pytest.approx(one_f_one_b, abs=6e-4)
    assert ratio(early) == pytest.approx(eager, abs=6e-4)


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 6),
    extra=st.integers(0, 6),
    forward=st.floats(0.1, 3),
    transfer=st.floats(0, 4),
)
def test_every_pipeline_takes_its_longest_path(
    pipeline, stages, microbatches, extra, forward, transfer
):
    schedule = pipeline(stages, microbatches, lambda stage: stages - stage + extra)
    seconds = {f"F{i}": forward * (1 + i / 3) for i in range(stages)}
    seconds |= {f"B{i}": 2.0 for i in range(stages)}
    result = simulate(schedule, seconds, lambda *_: transfer)
    assert result.step_seconds == pytest.approx(longest_path(schedule, seconds, transfer))
    for busy, bubble, exposed in zip(
        result.busy_seconds, result.bubble_seconds, result.exposed_seconds, strict=True
    ):
        assert busy + bubble == pytest.approx(result.step_seconds)
        assert 0 <= exposed <= bubble + 1e-9


def test_memory_peaks_at_the_microbatches_in_flight(pipeline, stage_seconds):
    sizes = {f"a{stage}": 10.0 for stage in range(4)}
    one_f_one_b = simulate(
        pipeline(4, 8, lambda stage: 4 - stage), stage_seconds(4), value_bytes=sizes,
        initial_bytes=(100.0, 0.0, 0.0, 0.0),
    )  # fmt: skip
    assert one_f_one_b.peak_bytes[0] == 100 + 4 * 10
    assert one_f_one_b.peak_bytes[3] == 2 * 10  # its own output and what it received
    gpipe = simulate(pipeline(4, 8, lambda stage: 8), stage_seconds(4), value_bytes=sizes)
    assert gpipe.peak_bytes[0] == 8 * 10


def test_temporaries_count_on_top_of_what_is_live(pipeline, stage_seconds):
    result = simulate(
        pipeline(1, 2, lambda stage: 1), stage_seconds(1), value_bytes={"a0": 10.0},
        task_bytes={"B0": 7.0},
    )  # fmt: skip
    assert result.peak_bytes == (17.0,)


def test_resharding_plans_are_timed_by_what_they_say(pipeline, stage_seconds):
    place = PlacedTensor(
        spec=ShardingSpec(((),)), axis_names=("x",), mesh_shape=(1,), devices=(0,), hosts=(0,)
    )
    task = ReshardingTask(tensor=TensorType((4,), "float32"), source=place, target=place)
    plan = ReshardingPlan(
        task=task, transfers=(), strategy="broadcast", seconds=0.5, lower_bound=0.5
    )
    schedule = pipeline(2, 3, lambda stage: 2 - stage)
    seconds = stage_seconds(2)
    with_plan = simulate(schedule, seconds, {"a0": plan, "g1": 0.25})
    assert (
        with_plan.step_seconds
        == simulate(
            schedule, seconds, lambda source, target, value: 0.5 if value == "a0" else 0.25
        ).step_seconds
    )
    assert with_plan.transfer_seconds == (1.5, 0.75)


def test_sixty_four_stages_and_512_microbatches(pipeline, stage_seconds):
    schedule = pipeline(64, 512, lambda stage: 64 - stage)
    seconds, sizes = stage_seconds(64), {f"a{stage}": 1.0 for stage in range(64)}
    result = simulate(schedule, seconds, lambda *_: 0.1, value_bytes=sizes)
    assert result.step_seconds > (512 + 63) * 3


def test_a_receive_that_nobody_sends_is_named():
    stuck = PipelineSchedule(
        name="stuck", num_stages=1, num_microbatches=1,
        programs=((Instruction(kind="receive", outputs=("a@0",), peer=1),), ()),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"never ends: mesh 0 waits at instruction 0 \(receive a@0"
    ):
        simulate(stuck, {})


def test_sends_and_receives_out_of_order_are_refused():
    crossed = PipelineSchedule(
        name="crossed", num_stages=2, num_microbatches=1,
        programs=(
            (Instruction(kind="send", inputs=("a@0",), peer=1),),
            (Instruction(kind="receive", outputs=("b@0",), peer=0),),
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match="mesh 0 sends a@0 when mesh 1 receives b@0"):
        simulate(crossed, {})


def test_missing_times_are_named(pipeline, stage_seconds):
    schedule = pipeline(2, 1, lambda stage: 1)
    with pytest.raises(ValueError, match="no entry for task 'F0' of mesh 0"):
        simulate(schedule, {})
    with pytest.raises(ValueError, match="no entry for value 'a0', which mesh 0 sends to mesh 1"):
        simulate(schedule, stage_seconds(2), {})
