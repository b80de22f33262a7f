import timeit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_interchange.mesh import MeshAxis
from cost_model import COLLECTIVE_BYTES, CostModel, cluster
from cost_model.collective import (
    BUCKET_BYTES,
    bucket_share_seconds,
    bucketed_seconds,
    collective_seconds,
)

FAST = MeshAxis(name="x", size=8, bandwidth=2e11, latency=5e-6)
SLOW = MeshAxis(name="y", size=4, bandwidth=1e10, latency=2e-5)
LARGE = 1e9


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_threads_meet_once_whatever_the_collective_and_its_axes(kind):
    both = collective_seconds(kind, 1e-9, (FAST, SLOW), meeting=True)
    assert both == pytest.approx(8 * 4 * 2e-5)
    one = collective_seconds(kind, 1e-9, (FAST,), meeting=True)
    assert one == pytest.approx(8 * 5e-6)
    large = collective_seconds(kind, LARGE, (FAST,), meeting=True)
    assert large == pytest.approx(collective_seconds(kind, LARGE, (FAST,)), rel=1e-2)


def test_devices_of_a_host_meet_and_buckets_save_meetings():
    model = CostModel(cluster("host:8", measure=False))
    axes = (MeshAxis(name="x", size=8, bandwidth=1e9, latency=2e-5),)
    assert model.collective_seconds("all-gather", 1.0, axes) == pytest.approx(1.6e-4, rel=1e-3)
    assert model.bucketed_seconds("all-gather", [1.0] * 5, axes) < 3 * 1.6e-4
    assert model.bucket_share_seconds("all-gather", 1.0, axes) < 1.6e-4


def test_large_collectives_take_the_ring_time():
    ring = 7 / 8 * LARGE / 2e11
    assert collective_seconds("all-reduce", LARGE, (FAST,)) == pytest.approx(2 * ring + 14 * 5e-6)
    assert collective_seconds("all-gather", LARGE, (FAST,)) == pytest.approx(ring + 7 * 5e-6)
    assert collective_seconds("reduce-scatter", LARGE, (FAST,)) == pytest.approx(ring + 7 * 5e-6)
    assert collective_seconds("all-to-all", LARGE, (FAST,)) == pytest.approx(ring, rel=0.01)
    assert collective_seconds("broadcast", LARGE, (FAST,)) == pytest.approx(LARGE / 2e11, rel=0.01)
    assert collective_seconds("collective-permute", LARGE, (FAST,)) == pytest.approx(
        LARGE / 2e11 + 5e-6
    )


def test_small_all_reduces_take_the_tree_time():
    assert collective_seconds("all-reduce", 8.0, (FAST,)) == pytest.approx(2 * 3 * 5e-6, rel=1e-3)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    parts = sum(collective_seconds(k, LARGE, (FAST,)) for k in ("reduce-scatter", "all-gather"))
    assert collective_seconds("all-reduce", LARGE, (FAST,)) == pytest.approx(parts)


def test_two_axes_reduce_on_the_fast_one_first():
    # 8 devices leave an eighth of the bytes for the slow axis of 4
    expected = 2 * (7 / 8 * LARGE / 2e11) + 2 * 3 / 4 * (LARGE / 8) / 1e10
    got = collective_seconds("all-reduce", LARGE, (FAST, SLOW))
    assert got == pytest.approx(expected, rel=0.01)
    assert got == collective_seconds("all-reduce", LARGE, (SLOW, FAST))
    assert got < 2 * 31 / 32 * LARGE / 1e10  # one flat ring at the slow bandwidth


def test_nothing_to_send_and_nobody_to_send_to_take_no_time():
    alone = MeshAxis(name="x", size=1)
    for kind in COLLECTIVE_BYTES:
        assert collective_seconds(kind, 0.0, (FAST,)) == 0.0
        assert collective_seconds(kind, 1e6, (alone,)) == 0.0
        assert collective_seconds(kind, 1e6, ()) == 0.0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(sorted(COLLECTIVE_BYTES)),
    sizes=st.lists(st.floats(0, 1e10), min_size=1, max_size=8),
    many=st.booleans(),
)
def test_arrays_give_what_their_numbers_give_and_time_never_falls(kind, sizes, many):
    axes = (FAST, SLOW) if many else (SLOW,)
    ordered = np.sort(np.array(sizes))
    times = collective_seconds(kind, ordered, axes)
    assert times == pytest.approx([collective_seconds(kind, size, axes) for size in ordered])
    assert (np.diff(times) >= -1e-15).all()


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="all-reduce.*got 'gossip'"):
        collective_seconds("gossip", 1.0, (FAST,))


def test_calls_are_cheap_enough_for_a_planner():

    model = CostModel(cluster("h100:16"))
    call = lambda: model.collective_seconds("all-reduce", 1e6, (FAST, SLOW))  # noqa: E731
    assert min(timeit.repeat(call, number=1000, repeat=3)) / 1000 < 20e-6


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(sorted(COLLECTIVE_BYTES)),
    sizes=st.lists(st.floats(1, 1e8), min_size=1, max_size=12),
    many=st.booleans(),
)
def test_shares_of_buckets_are_at_most_the_buckets_which_are_at_most_single_sends(
    kind, sizes, many
):
    axes, launch = (FAST, SLOW) if many else (SLOW,), 1e-6
    shares = sum(bucket_share_seconds(kind, size, axes, launch) for size in sizes)
    together = bucketed_seconds(kind, sizes, axes, launch)
    alone = sum(collective_seconds(kind, size, axes) for size in sizes)
    assert shares <= together * (1 + 1e-9)
    assert together <= alone * (1 + 1e-9)


def test_small_tensors_share_one_latency():
    together = bucketed_seconds("all-reduce", [8.0] * 40, (FAST,))
    assert together == pytest.approx(collective_seconds("all-reduce", 320.0, (FAST,)))
    assert bucketed_seconds("all-reduce", [BUCKET_BYTES / 2] * 4, (FAST,)) == pytest.approx(
        2 * collective_seconds("all-reduce", BUCKET_BYTES, (FAST,))
    )


def test_a_bucket_is_paid_launch_by_launch():
    none = bucketed_seconds("all-gather", [8.0] * 5, (FAST,))
    assert bucketed_seconds("all-gather", [8.0] * 5, (FAST,), 3e-6) == pytest.approx(none + 15e-6)
