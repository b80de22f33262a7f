"""Values in the memory of arrays that were copied."""

from alpa_interchange import ShardingSpec
from alpa_meta.intra_op.free_places import Place, spans_outside
from alpa_meta.intra_op.held_values import KINDS, Span
from alpa_meta.intra_op.stage_problem import Source


def span(size, start, stop, kind="temporaries"):
    source = Source(0, (ShardingSpec(((),)),), (int(size),), size)
    return Span(source, start, stop, KINDS.index(kind))


def test_a_copy_lies_where_the_array_copied_before_it_lay():
    copies = [span(8.0, 1, 20), span(8.0, 2, 18), span(8.0, 3, 16)]
    places = [Place(8.0, 2, 20), Place(8.0, 3, 18), Place(8.0, 4, 16)]
    assert spans_outside(copies, places) == copies[:1]


def test_values_share_a_place_one_after_another_and_not_longer_than_it_is_free():
    one, two, beside, late = (
        span(4.0, 2, 5), span(4.0, 5, 9), span(4.0, 4, 6), span(4.0, 8, 11),
    )  # fmt: skip
    assert spans_outside([one, two, beside], [Place(8.0, 2, 10)]) == [beside]
    assert spans_outside([late], [Place(8.0, 2, 10)]) == [late]
    assert spans_outside([span(4.0, 8, 11, "gradients")], [Place(8.0, 2, 10)]) == []


def test_the_largest_choose_first_and_the_smallest_place_that_fits():
    small, large = span(2.0, 3, 8), span(8.0, 3, 8)
    assert spans_outside([small, large], [Place(8.0, 1, 9)]) == [small]
    assert spans_outside([small, large], [Place(8.0, 1, 9), Place(2.0, 1, 9)]) == []
    assert spans_outside([span(9.0, 3, 8)], [Place(8.0, 1, 9)]) != []
