import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpa_interchange.schedule import Instruction, PipelineSchedule
from cost_model import simulate, simulate_shared


def test_bubbles_cost_nothing_when_others_use_the_processor(pipeline, stage_seconds):
    schedule = pipeline(4, 8, lambda stage: 4 - stage)
    # 4 meshes x 8 microbatches x 3 s, stated for 4 busy meshes: 24 s of the whole processor
    assert simulate_shared(schedule, stage_seconds(4)).step_seconds == pytest.approx(24.0)
    assert simulate(schedule, stage_seconds(4)).step_seconds == 33.0


def test_two_meshes_share_until_the_shorter_task_ends():
    schedule = PipelineSchedule(
        name="beside", num_stages=2, num_microbatches=1,
        programs=tuple((Instruction(kind="run", task=task),) for task in ("long", "short")),
    )  # fmt: skip
    result = simulate_shared(schedule, {"long": 3.0, "short": 1.0})
    # both run at their stated rate for 1 s; then the long one has 2 s left at twice the rate
    assert result.step_seconds == pytest.approx(2.0)
    assert result.busy_seconds == pytest.approx((2.0, 1.0))


@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    transfer=st.floats(0, 2),
    extra=st.integers(0, 4),
)
def test_sharing_is_never_slower_than_equal_parts_nor_faster_than_the_work(
    pipeline, stage_seconds, stages, microbatches, transfer, extra
):
    schedule = pipeline(stages, microbatches, lambda stage: stages - stage + extra)
    seconds = stage_seconds(stages)
    shared = simulate_shared(schedule, seconds, lambda *_: transfer).step_seconds
    assert shared <= simulate(schedule, seconds, lambda *_: transfer).step_seconds + 1e-9
    assert shared >= 3.0 * microbatches - 1e-9


def test_memory_is_counted_as_without_sharing(pipeline, stage_seconds):
    schedule, sizes = pipeline(3, 6, lambda stage: 3 - stage), {"a0": 5.0, "a1": 5.0}
    shared = simulate_shared(schedule, stage_seconds(3), value_bytes=sizes)
    assert shared.peak_bytes == simulate(schedule, stage_seconds(3), value_bytes=sizes).peak_bytes


def test_a_receive_that_nobody_sends_is_named():
    stuck = PipelineSchedule(
        name="stuck", num_stages=1, num_microbatches=1,
        programs=((Instruction(kind="receive", outputs=("a@0",), peer=1),), ()),
    )  # fmt: skip
    with pytest.raises(ValueError, match="mesh 0 waits"):
        simulate_shared(stuck, {})
