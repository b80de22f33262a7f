"""Megatron's interleaved order as arrays says the same as the schedule that meshes run."""

import pytest

from stage_dp import order
from stage_dp.interleaved_order import interleaved_order

NAME = "interleaved-1f1b"


@pytest.mark.parametrize("num_meshes", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_no_order_waits_for_itself_and_each_counts_what_is_in_flight(num_meshes, chunks):
    for count in [*range(1, 3 * num_meshes + 2), 4 * num_meshes]:
        found = interleaved_order(num_meshes, chunks, count)
        assert not found.waits_for_itself()
        schedule = order(NAME, num_meshes * chunks, count, num_meshes=num_meshes)
        assert len(schedule.global_order()) == 2 * num_meshes * chunks * count
        counted = tuple(map(schedule.in_flight, range(num_meshes * chunks)))
        assert found.in_flight == counted


def test_two_chunks_on_each_of_two_meshes():
    schedule = order(NAME, 4, 4, num_meshes=2)
    shown = [
        " ".join(f"{s.phase[0]}{s.stage}{s.microbatch}" for s in steps) for steps in schedule.steps
    ]
    assert shown == [
        "f00 f01 f20 f21 f02 b20 f03 b21 f22 b00 f23 b01 b22 b23 b02 b03",
        "f10 f11 f30 b30 f31 b31 f12 b10 f13 b11 f32 b32 f33 b33 b12 b13",
    ]


def test_orders_of_a_last_group_that_is_not_full_warm_up_longer():
    full, more = interleaved_order(4, 3, 8), interleaved_order(4, 3, 9)
    assert full.warmups == (15, 13, 11, 9)
    assert more.warmups == (16, 14, 12, 10)
