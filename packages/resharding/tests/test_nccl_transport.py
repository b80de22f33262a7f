"""The NCCL transport on a fake CUDA whose streams run late and in harmful orders.

What is true of it is in `nccl_claims`; `test_nccl_mutations` puts mistakes back.
"""

from importlib.util import find_spec

import pytest
from attrs import evolve
from fake_cuda import Hang
from nccl_claims import check_equal, pair_of, post, team_of

from resharding import Network, TransportError, plan
from resharding.cases import random_task
from resharding.nccl_library import NcclRanks, as_cupy_id, unique_id


@pytest.mark.sample(seed=5)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "strategy", ["send_recv", "broadcast", "global_all_gather", "tile_tree", "auto"]
)
def test_gpus_get_the_tiles_the_host_executor_gives(
    make_world, make_shards, monkeypatch, strategy, seed
):
    monkeypatch.setattr("resharding.hops.LEAST_CHUNK_BYTES", 16)
    task = random_task(seed, longest=16)
    task = evolve(task, tensor=evolve(task.tensor, dtype="uint16"))
    check_equal(make_world(seed), task, strategy, make_shards(task)[0])


def test_ids_have_a_fixed_length():
    with pytest.raises(ValueError, match="an id has 128 bytes, got 3"):
        as_cupy_id(b"abc", "14.0.0")


def test_a_pair_without_a_communicator_and_a_second_post_are_refused(make_world, make_task):
    world, task = make_world(), pair_of(make_task)
    ends = team_of(world, [task])
    other = make_task((64, 8), (2, 2), "R R", (1, 1), "R R", dtype="uint32")
    other = evolve(other, source=task.target, target=task.source)
    with pytest.raises(TransportError, match="has no communicator from devices"):
        ends["host 0"].receive("k", plan(other))
    ends["host 1"].receive("k", plan(task))
    with pytest.raises(ValueError, match="host 1 has no send of k to post"):
        ends["host 1"].send("k", plan(task), dict)


def test_summands_are_refused_with_what_to_do_instead(make_world, make_task):
    world, task = make_world(), pair_of(make_task)
    ends = team_of(world, [task])
    summands = evolve(task.source, spec=evolve(task.source.spec, dims=((), ()), partial=("host",)))
    made = plan(evolve(task, source=summands), Network(issue="none"))
    with pytest.raises(ValueError, match="an unreduced sum over .*sum it up on its own mesh first"):
        ends["host 0"].send("k", made, dict)
    ends["host 0"].close()


def test_a_transfer_names_those_it_waits_for_from_when_its_streams_have_come_to_it(
    make_world, make_task, make_shards
):
    world, task = make_world(), pair_of(make_task)
    ends, made = team_of(world, [task]), plan(task, Network(), "broadcast")
    shards = make_shards(task)[0]

    def posted(name):
        return post(world, {name: ends[name]}, made, shards)

    (sending,), _ = posted("host 0")
    ends["host 0"].look()
    assert sending.awaited() == ((), 0.0)  # what it sends is not computed
    with pytest.raises(Hang):
        world.run()
    ends["host 0"].look()
    ((first,), quiet) = sending.awaited()
    assert first in ("host 1", "host 2") and quiet >= 0
    other = {"host 1": "host 2", "host 2": "host 1"}[first]
    receivings = [receiving for name in (first, other) for receiving in posted(name)[1].values()]
    assert [one.awaited() for one in receivings] == [((), 0.0)] * 2
    world.run()
    for end in ends.values():
        end.look()
    assert [one.awaited() for one in (sending, *receivings)] == [((), 0.0)] * 3


def test_a_receive_names_its_sender_and_not_those_it_passes_on_to(
    make_world, make_task, make_shards
):
    world, task = make_world(), pair_of(make_task)
    ends, made = team_of(world, [task]), plan(task, Network(), "broadcast")
    waiting = {}
    for name in ("host 1", "host 2"):
        waiting.update(post(world, {name: ends[name]}, made, make_shards(task)[0])[1])
    with pytest.raises(Hang):
        world.run()
    for end in ends.values():
        end.look()
    givers = {name: receiving.awaited()[0] for name, receiving in waiting.items()}
    assert sorted(givers.values()) in ([("host 0",), ("host 1",)], [("host 0",), ("host 2",)])


def test_closing_fails_what_is_under_way(make_world, make_task):
    world, task = make_world(), pair_of(make_task)
    ends = team_of(world, [task])
    receiving = ends["host 1"].receive("k", plan(task))
    ends["host 1"].close()
    with pytest.raises(TransportError, match="host 1 was closed"):
        receiving.result(1)


# ---------------------------------------------------------------------- with CuPy, with a GPU


def num_gpus():
    """Return the number of CUDA devices CuPy sees; 0 without CuPy or a driver."""
    if find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs the extra resharding[nccl] (CuPy)")
def test_a_unique_id_is_128_bytes_even_without_a_gpu():
    assert len(unique_id()) == 128


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason=f"needs a CUDA device and CuPy, found {num_gpus()}")
def test_one_gpu_makes_a_communicator_and_events_on_its_streams():
    ranks = [NcclRanks(name, unique_id(), 1, {0: 0}) for name in ("forth", "back")]
    events = [each.event(0) for each in ranks]
    for event in events:
        event.synchronize()
        assert event.done
    assert ranks[0].streams[0].ptr != ranks[1].streams[0].ptr
    for each in ranks:
        each.check()
        each.abort()
    with pytest.raises(TransportError, match="was given up"):
        ranks[0].issue([], "nothing")
