"""Ring formulas, with the arithmetic written out."""

from __future__ import annotations

import pytest

from alpa_meta.audit.planned import PlannedCollective, link_bytes


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 2 * 800 * 3 / 4),
        ("all-gather", 800 * 3 / 4),
        ("reduce-scatter", 800 * 3),  # the operand is 3200 bytes, 3/4 of it is sent
        ("all-to-all", 800 * 3 / 4),
        ("collective-permute", 800),
    ],
)
def test_link_bytes_of_a_ring_of_four_follow_the_formulas(kind, sent):
    assert link_bytes(kind, 800, 4) == sent


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_a_group_of_one_sends_nothing(kind):
    assert link_bytes(kind, 800, 1) == 0


def test_reduce_scatter_then_all_gather_sends_as_much_as_all_reduce():
    parts = link_bytes("reduce-scatter", 200, 4) + link_bytes("all-gather", 800, 4)
    assert parts == link_bytes("all-reduce", 800, 4)


def test_a_planned_collective_counts_all_its_trips_and_axes():
    one = PlannedCollective(
        kind="all-gather", axes=("model", "data"), bytes=800, dtype="float32", trips=3
    )
    assert one.axes == ("data", "model")
    assert one.link_bytes({"data": 2, "model": 4}) == 3 * 800 * 7 / 8


def test_unknown_kinds_and_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="kind"):
        PlannedCollective(kind="allreduce", axes=("x",), bytes=4, dtype="float32")
    with pytest.raises(ValueError, match="bytes must be at least 0, got -4"):
        PlannedCollective(kind="all-reduce", axes=("x",), bytes=-4, dtype="float32")
    with pytest.raises(ValueError, match="trips must be at least 1 or None, got 0"):
        PlannedCollective(kind="all-reduce", axes=("x",), bytes=4, dtype="float32", trips=0)
