"""Copies of operands in another order: what is stored in place of what is fused into them."""

import pytest

from alpa_interchange import ShardingSpec
from alpa_meta.intra_op.dim_orders import DimOrders
from alpa_meta.intra_op.liveness import Timeline
from alpa_meta.intra_op.stage_problem import Source


def value(*shape, itemsize=4.0):
    size = itemsize
    for dim in shape:
        size *= dim
    return Source(0, (ShardingSpec(tuple(() for _ in shape)),), shape, size)


def held(timeline):
    """Return [(shape, start, stop)] of all spans."""
    return [(span.source.shape, span.start, span.stop) for span in timeline.spans()]


def test_a_transposed_value_is_read_as_it_lies_where_rows_and_columns_change_places():
    orders, product, turned = DimOrders(), value(2, 3, 4), value(2, 4, 3)
    orders.transpose(turned, product, (0, 2, 1))
    assert orders.numbered(turned) == (0, 1, 2)
    assert orders.copied(turned, ((0,), (1,), (2,))) is None


def test_dims_of_size_one_lie_anywhere():
    orders, product, turned = DimOrders(), value(3, 1, 4), value(1, 3, 4)
    orders.transpose(turned, product, (1, 0, 2))
    assert orders.copied(turned, ((0,), (1,), (2,))) is None


def test_heads_that_are_not_together_with_the_batch_are_copied_there():
    queries = value(2, 5, 3, 4)  # batch, tokens, heads, depth
    assert DimOrders().copied(queries, ((0, 2), (1,), (3,))) == (0, 2, 1, 3)


@pytest.mark.parametrize(("on_host", "num_copies"), [(False, 1), (True, 2)])
def test_both_passes_share_a_copy_where_rows_and_columns_may_change_places(on_host, num_copies):
    timeline, keys = Timeline(on_host=on_host), value(2, 5, 3, 4)
    timeline.advance("forward")
    timeline.compute("stored", [], [keys])
    for matrix in (((0, 2), (3,), (1,)), ((0, 2), (1,), (3,))):
        timeline.advance("forward")
        timeline.compute("stored", [keys], [value(1)], matrices=[matrix])
    copies = [one for one in held(timeline) if one[0] == keys.shape]
    assert len(copies) == 1 + num_copies  # beside the keys themselves


def test_what_only_copies_read_is_not_stored():
    """Scores of shape (batch, keys, queries, groups) whose probabilities two products read with
    groups before queries: each has a copy of its own, for as long as it runs."""
    timeline, scores = Timeline(), value(2, 9, 7, 4)
    turned, light = value(2, 4, 7, 9), value(2, 4, 7, 9)
    timeline.advance("forward")
    timeline.compute("stored", [], [scores])
    timeline.advance("forward")
    timeline.compute("alias", [scores], [turned], permutation=(0, 3, 2, 1))
    timeline.advance("forward")
    timeline.compute("fused", [turned], [light])
    for matrix in (((0,), (3,), (1, 2)), ((0,), (1, 2), (3,))):
        timeline.advance("forward")
        timeline.compute("stored", [light], [value(1)], matrices=[matrix])
    found = [one for one in held(timeline) if len(one[0]) == 4]
    assert found == [
        (scores.shape, 1, 6),
        (light.shape, 4, 5),
        (light.shape, 5, 6),
    ]


def test_hosts_multiply_two_byte_elements_in_four_bytes():
    timeline, narrow, product = Timeline(on_host=True), value(3, 4, itemsize=2.0), value(3, 5)
    timeline.advance("forward")
    timeline.compute("stored", [], [narrow])
    timeline.advance("forward")
    timeline.compute("stored", [narrow], [product], matrices=[((), (0,), (1,))])
    assert sorted(span.source.bytes for span in timeline.spans()) == [24.0, 48.0, 60.0]


def test_a_loop_reads_a_copy_of_what_does_not_lie_trip_by_trip():
    timeline, stacked, turned = Timeline(), value(2, 3), value(3, 2)
    timeline.advance("forward")
    timeline.compute("stored", [], [stacked])
    timeline.advance("forward")
    timeline.compute("alias", [stacked], [turned], permutation=(1, 0))
    timeline.advance("forward")
    began = timeline.now
    for _ in range(4):
        timeline.advance("forward")
    timeline.hold_for_loop([turned], began)
    assert (turned.shape, began, timeline.now + 1) in held(timeline)


@pytest.mark.parametrize(("num_layers", "early"), [(3, False), (30, True)])
def test_hosts_run_what_is_computed_again_at_once_behind_many_paths(num_layers, early):
    """Each layer doubles the paths to its result: 2^3 are less than the values of three layers,
    2^30 more than those of thirty. The update waits for nothing."""
    timeline, last = Timeline(on_host=True, whole_step=True), value(8)
    timeline.advance("forward")
    timeline.compute("stored", [], [last])
    for _ in range(num_layers):
        halves = value(8), value(8)
        for half in halves:
            timeline.advance("forward")
            timeline.compute("stored", [last], [half])
        last = value(8)
        timeline.advance("forward")
        timeline.compute("stored", list(halves), [last])
    ready = timeline.now
    for _ in range(10):
        timeline.advance("forward")
    timeline.advance("backward")
    timeline.compute_again()
    again = value(5)
    timeline.compute("stored", [last], [again])
    (start,) = [start for shape, start, _ in held(timeline) if shape == (5,)]
    assert (start == ready) == early
