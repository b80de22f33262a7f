"""Step times are the longest path through the schedule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_dp import order, pipeline_time


def test_two_stages_by_hand():
    # Stage 0: f0 0-1, f1 1-2; crossing 0.5; stage 1: f0 1.5-2.5, b0 2.5-4.5, f1 4.5-5.5,
    # b1 5.5-7.5; gradients arrive at 5 and 8: b0 5-7, b1 8-10; update of 0 takes 1.
    result = pipeline_time(order("1f1b", 2, 2), [1, 1], [2, 2], [0.5], [1.0, 5.0])
    assert result.pipeline_stop == (10.0, 7.5)
    assert result.step_seconds == 12.5
    assert result.busy_seconds == (6.0, 6.0)


def test_a_link_carries_one_transfer_at_a_time():
    # gpipe, 3 microbatches of 1 s forward, 4 s to cross: arrivals at 5, 9, 13 and so on.
    result = pipeline_time(order("gpipe", 2, 3), [1, 1], [0, 0], [4.0])
    assert result.pipeline_stop[1] == 14.0


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5),
    m=st.integers(1, 8),
    forward=st.floats(0.1, 2),
    backward=st.floats(0.1, 2),
    name=st.sampled_from(["1f1b", "gpipe"]),
)
def test_equal_stages_take_microbatches_plus_stages_less_one(n, m, forward, backward, name):
    result = pipeline_time(order(name, n, m), [forward] * n, [backward] * n)
    assert result.step_seconds == pytest.approx((m + n - 1) * (forward + backward))


def test_microbatches_may_take_different_times():
    same = pipeline_time(order("1f1b", 2, 2), [1, 1], [2, 2]).step_seconds
    table = pipeline_time(order("1f1b", 2, 2), [[1, 1], [1, 1]], [[2, 2], [2, 2]]).step_seconds
    assert same == table
    slower = pipeline_time(order("1f1b", 2, 2), [[1, 4], [1, 1]], [[2, 2], [2, 2]]).step_seconds
    assert slower > same


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="one row per stage or boundary: 2"):
        pipeline_time(order("1f1b", 2, 2), [1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="shape"):
        pipeline_time(order("1f1b", 2, 2), [[1.0], [1.0]], [1.0, 1.0])


def test_token_slices_are_units_of_their_microbatch():
    # Slices of 1 and 2 s forward, 3 and 1 s backward. Stage 1: f0 1-2, f1 3-5, b1 5-6, b0 6-9;
    # stage 0: f0 0-1, f1 1-3, b1 6-7, b0 9-12.
    schedule = order("gpipe", 2, 1, num_slices=2)
    found = pipeline_time(schedule, [[1.0, 2.0]] * 2, [[3.0, 1.0]] * 2)
    assert found.step_seconds == 12.0
