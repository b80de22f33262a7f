"""Many pipelines at once against the longest path of each."""

import numpy as np
import pytest

from stage_dp import order, pipeline_time
from stage_dp.batched_time import batched_step_seconds


@pytest.mark.sample(seed=20)
@pytest.mark.parametrize("seed", range(60))
def test_waves_give_the_longest_path(seed):
    rng = np.random.default_rng(seed)
    n, count = int(rng.integers(1, 7)), int(rng.integers(1, 12))
    name = ("gpipe", "1f1b", "eager-1f1b", "adaptive", "zero-bubble-h1")[seed % 5]
    warmups: list[int] | None = None
    if name == "adaptive":
        wanted = 1 + np.cumsum([0, *(1 + rng.integers(0, 4, n - 1))])[::-1]
        warmups = [int(min(count, k)) for k in wanted]
    split = name == "zero-bubble-h1"
    if split:
        least = [min(n - i, count) for i in range(n)]
        warmups = [int(rng.integers(k, min(n, count) + 1)) for k in least]
    schedule = order(name, n, count, warmups=warmups)
    held = warmups if split and warmups else [schedule.in_flight(stage) for stage in range(n)]
    forward, backward, tail = rng.uniform(0, 3, (3, 4, n))
    boundary = rng.uniform(0, 2, (4, n - 1)) * rng.integers(0, 2, (4, n - 1))
    weight = backward * rng.uniform(0, 1, (4, n))
    figures = (forward, backward, boundary, tail, weight if split else None)
    seconds = batched_step_seconds(held, count, *figures)
    for row in range(4):
        alone = pipeline_time(
            schedule, forward[row], backward[row], boundary[row], tail[row], weight=weight[row]
        )
        assert seconds[row] == pytest.approx(alone.step_seconds, rel=1e-9)


def test_a_stage_that_is_slower_by_a_little_takes_over_late():
    rng = np.random.default_rng(0)
    forward, backward = rng.uniform(1.0, 1.05, (2, 8, 6))
    boundary, tail = np.full((8, 5), 0.01), np.ones((8, 6))
    seconds = batched_step_seconds(tuple(range(6, 0, -1)), 300, forward, backward, boundary, tail)
    schedule = order("1f1b", 6, 300)
    for row in range(8):
        alone = pipeline_time(schedule, forward[row], backward[row], boundary[row], tail[row])
        assert seconds[row] == pytest.approx(alone.step_seconds, rel=1e-9)
