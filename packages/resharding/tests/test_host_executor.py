import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resharding import HostExecutor, Network, plan
from resharding.cases import random_task
from resharding.strategies import STRATEGIES


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(list(STRATEGIES)))
def test_every_target_tile_is_equal_bit_for_bit(make_shards, same_bytes, seed, overlap, strategy):
    task = random_task(seed, overlap=overlap, longest=12)
    shards, expected = make_shards(task)
    same_bytes(HostExecutor(plan(task, Network(), strategy)).run(shards), expected)


def test_wrong_shards_are_refused_with_the_device(make_task, make_shards):
    task = make_task((8, 8), (1, 2), "S1 R", (1, 2), "R S1")
    shards, _ = make_shards(task)
    executor = HostExecutor(plan(task))
    with pytest.raises(ValueError, match=r"exactly the source devices \[0, 1\], got \[0\]"):
        executor.run({0: shards[0]})
    with pytest.raises(ValueError, match=r"shard of device 1 must have the shape \(4, 8\)"):
        executor.run({**shards, 1: np.zeros((3, 8), np.float32)})
    with pytest.raises(ValueError, match="all shards must have one dtype"):
        executor.run({**shards, 1: np.zeros((4, 8), np.int32)})
