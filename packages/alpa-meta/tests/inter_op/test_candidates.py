"""Candidates of the stage DP: ranges, microbatch counts, floors."""

import pytest

import stage_dp
from alpa_meta.inter_op.candidates import microbatch_counts


@pytest.mark.parametrize(
    ("batch", "stages", "given", "counts"),
    [
        (16, 1, None, [1]),
        (16, None, None, [1, 8]),
        (16, 2, None, [4, 8]),
        (16, None, 4, [4]),
        (12, 2, None, [4, 6]),
        (12, 4, None, [6, 12]),
        (7, 3, None, [1, 7]),
    ],
)
def test_counts_divide_the_batch_and_suit_the_depth(batch, stages, given, counts):
    possible = stage_dp.microbatch_counts(batch)
    assert microbatch_counts(possible, stages, given) == counts
