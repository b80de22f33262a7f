import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model import gradient_reduction, overlapped

times = st.floats(0, 100)


def test_communication_hides_behind_longer_computation_but_slows_it():
    both = overlapped(10.0, 4.0, 1.25)
    assert (both.seconds, both.exposed, both.hidden_share) == (11.0, 1.0, 0.75)


def test_longer_communication_is_exposed_by_its_rest():
    assert overlapped(4.0, 10.0, 1.0).exposed == 6.0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(compute=times, communication=times, slowdown=st.floats(1, 2))
def test_overlapping_lies_between_the_longer_and_the_sum(compute, communication, slowdown):
    seconds = overlapped(compute, communication, slowdown).seconds
    assert max(compute, communication) - 1e-9 <= seconds <= compute + communication + 1e-9


def test_arrays_give_what_their_numbers_give():
    compute, communication = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0, 1.0])
    both = overlapped(compute, communication)
    each = [overlapped(c, d).seconds for c, d in zip(compute, communication, strict=True)]
    assert both.seconds == pytest.approx(each)


def test_one_bucket_hides_nothing_and_many_hide_almost_all():
    assert gradient_reduction(10.0, 4.0, 1).exposed == pytest.approx(4.0)
    many = gradient_reduction(10.0, 4.0, 100, slowdown=1.0)
    assert many.exposed == pytest.approx(0.04)
    assert many.hidden_share == pytest.approx(0.99)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="slowdown must be between 1 and 2, got 3"):
        overlapped(1.0, 1.0, 3)
    with pytest.raises(ValueError, match="num_buckets must be at least 1"):
        gradient_reduction(1.0, 1.0, 0)
