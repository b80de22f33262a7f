import math
import time

import numpy as np
import pytest

from ilp_sharding.bound.cutting_planes import highest_point
from ilp_sharding.exceptions import OutOfTime


@pytest.mark.parametrize("seed", range(5))
def test_no_point_of_a_grid_is_higher(seed):
    random = np.random.default_rng(seed)
    heights, slopes = random.normal(size=4), random.normal(size=(4, 2))
    height, prices = highest_point(heights, slopes, most=3.0)

    def lowest_plane(point):
        return float((heights + slopes @ point).min())

    grid = [np.array([x, y]) for x in np.linspace(0, 3, 61) for y in np.linspace(0, 3, 61)]
    assert ((prices >= 0) & (prices <= 3)).all()
    assert height == pytest.approx(lowest_plane(prices), abs=1e-7)
    assert height >= max(map(lowest_plane, grid)) - 1e-7


def test_the_point_is_not_above_the_ceiling():
    height, _ = highest_point(np.array([1.0]), np.array([[1.0]]), most=10.0, ceiling=2.0)
    assert height == pytest.approx(2.0)


def test_planes_without_prices():
    height, prices = highest_point(np.array([3.0, 1.0]), np.zeros((2, 0)), most=math.inf)
    assert height == pytest.approx(1.0)
    assert prices.shape == (0,)


def test_it_does_not_begin_after_its_time():
    with pytest.raises(OutOfTime):
        highest_point(np.ones(1), np.ones((1, 1)), most=1.0, until=time.perf_counter() - 1.0)
