"""Megatron's interleaved order as arrays says the same as the schedule that meshes run."""

import numpy as np
import pytest

from stage_dp import order
from stage_dp.interleaved_bound import in_flight_least
from stage_dp.interleaved_order import holding_order, interleaved_order

NAME = "interleaved-1f1b"


@pytest.mark.parametrize("num_meshes", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_no_order_waits_for_itself_and_each_counts_what_is_in_flight(num_meshes, chunks):
    for count in [*range(1, 3 * num_meshes + 2), 4 * num_meshes]:
        found = interleaved_order(num_meshes, chunks, count)
        assert not found.waits_for_itself()
        schedule = order(NAME, num_meshes * chunks, count, num_meshes=num_meshes)
        assert len(schedule.global_order()) == 2 * num_meshes * chunks * count
        alone = tuple(map(schedule.in_flight, range(num_meshes * chunks)))
        for mesh, alive in enumerate(found.alive):
            assert alive.max(axis=0).tolist() == list(alone[mesh::num_meshes])
            held = _moments(schedule.steps[mesh], chunks, num_meshes)
            assert set(map(tuple, alive.tolist())) == _largest(held)
            own = found.in_flight[mesh::num_meshes]
            assert own in held and sum(own) == max(map(sum, held))


def _moments(steps, chunks, num_meshes):
    """Return the microbatches of each chunk that are alive while each of a mesh's steps runs."""
    alive, found = [0] * chunks, set()
    for step in steps:
        alive[step.stage // num_meshes] += step.phase == "forward"
        found.add(tuple(alive))
        alive[step.stage // num_meshes] -= step.phase == "backward"
    return found


def _largest(moments):
    def below(one, other):
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return {one for one in moments if not any(below(one, other) for other in moments)}


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_every_chunk_holds_what_bounds_count_on_at_the_fullest_moment(chunks):
    for num_meshes in (1, 2, 3, 6):
        for count in range(1, 4 * num_meshes + 3):
            found = interleaved_order(num_meshes, chunks, count)
            held = np.array(found.in_flight).reshape(chunks, num_meshes)
            for mesh in range(num_meshes):
                assert held[:, mesh].min() >= in_flight_least(num_meshes, count, mesh)


@pytest.mark.parametrize(("num_meshes", "chunks"), [(2, 2), (3, 2), (4, 3), (5, 4), (6, 4)])
def test_a_shorter_order_holds_as_much_at_every_moment(num_meshes, chunks):
    for count in range(4 * num_meshes + 1, 7 * num_meshes):
        full = interleaved_order(num_meshes, chunks, count)
        short = holding_order(num_meshes, chunks, count)
        assert not full.waits_for_itself()
        assert full.holds_all or short.num_microbatches < count
        assert [one.tolist() for one in short.alive] == [one.tolist() for one in full.alive]


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
