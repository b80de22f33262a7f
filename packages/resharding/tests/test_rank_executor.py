from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resharding import CommunicationError, LoopbackWorld, Network, RankExecutor, plan
from resharding.cases import random_task
from resharding.strategies import STRATEGIES


def run_everywhere(made, shards, expected, timeout=20.0):
    """Execute a plan with one thread per device; return the results and the bytes carried."""
    devices = sorted({*made.task.source.devices, *made.task.target.devices})
    rank_of = {device: rank for rank, device in enumerate(devices)}
    world = LoopbackWorld(len(devices), timeout)
    dtype = next(iter(shards.values())).dtype

    def work(device):
        communicator = world.communicator(rank_of[device])
        executor = RankExecutor(made, device, communicator, rank_of)
        return executor.run(shards.get(device), dtype)

    with ThreadPoolExecutor(len(devices)) as pool:
        results = dict(zip(devices, pool.map(work, devices), strict=True))
    return {device: results[device] for device in expected}, world.num_bytes


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(list(STRATEGIES)))
def test_ranks_that_only_talk_by_messages_get_equal_tiles(
    make_shards, same_bytes, seed, overlap, strategy
):
    task = random_task(seed, overlap=overlap, longest=12)
    shards, expected = make_shards(task)
    network = Network(chunk_bytes=16, least_chunk_bytes=4)
    results, _ = run_everywhere(plan(task, network, strategy), shards, expected)
    same_bytes(results, expected)


def test_a_broadcast_carries_each_byte_once_per_receiver(make_task, make_shards):
    task = make_task((64,), (1, 1), "R", (3, 2), "R")
    shards, expected = make_shards(task)
    network = Network(least_chunk_bytes=8)
    _, carried = run_everywhere(plan(task, network, "broadcast"), shards, expected)
    assert carried == 64 * 4 * 6


def test_a_rank_that_stays_away_is_named_with_its_blocked_partners(make_task, make_shards):
    task = make_task((8,), (1, 1), "R", (1, 2), "R", dtype="int8")
    made = plan(task, Network(), "broadcast")
    shards, _ = make_shards(task)
    rank_of = {0: 0, 100: 1, 101: 2}
    world = LoopbackWorld(3, timeout=0.2)
    with pytest.raises(
        CommunicationError,
        match=r"no partner within 0.2 s; blocked are: rank 0 send of \d+ bytes to rank 1 \(transf",
    ):
        RankExecutor(made, 0, world.communicator(0), rank_of).run(shards[0])


def test_misplaced_shards_and_ranks_are_refused(make_task, make_shards):
    task = make_task((8,), (1, 1), "R", (1, 1), "R")
    made, world = plan(task), LoopbackWorld(2)
    shards, _ = make_shards(task)
    with pytest.raises(ValueError, match="device 0 was given no shard, but the plan has one"):
        RankExecutor(made, 0, world.communicator(0), {0: 0, 100: 1}).run(None)
    with pytest.raises(ValueError, match="device 0 has rank 1, but the communicator is rank 0"):
        RankExecutor(made, 0, world.communicator(0), {0: 1, 100: 0})
    with pytest.raises(ValueError, match="has no shard, so run.. needs the dtype"):
        RankExecutor(made, 100, world.communicator(1), {0: 0, 100: 1}).run(None)
    with pytest.raises(ValueError, match="shard of device 0 must have the shape"):
        RankExecutor(made, 0, world.communicator(0), {0: 0, 100: 1}).run(shards[0][:3])


def test_elements_smaller_than_a_byte_travel_a_byte_each(make_task, make_shards, same_bytes):
    task = make_task((8, 4), (1, 2), "S1 R", (2, 2), "R S0", dtype="int4")
    shards, expected = (
        {device: array.astype(np.int8) for device, array in side.items()}
        for side in make_shards(task)
    )
    for strategy in STRATEGIES:
        results, _ = run_everywhere(plan(task, Network(), strategy), shards, expected)
        same_bytes(results, expected)
