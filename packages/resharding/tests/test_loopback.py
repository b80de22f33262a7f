from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from resharding import CommunicationError, LoopbackWorld


def run(world, *works):
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work, world.communicator(rank)) for rank, work in enumerate(works)]
        return [future.exception() or future.result() for future in futures]


def test_messages_between_two_ranks_match_in_order():
    got = [np.zeros(3, np.uint8), np.zeros(3, np.uint8)]

    def send(rank):
        for value in (1, 2):
            rank.send(np.full(3, value, np.uint8), 1, "m")

    def receive(rank):
        for buffer in got:
            rank.receive(buffer, 0, "m")

    run(LoopbackWorld(2, 5.0), send, receive)
    assert [buffer[0] for buffer in got] == [1, 2]


def test_an_exchange_needs_a_group():
    buffers = [np.full(4, rank, np.uint8) for rank in range(2)]
    got = [np.zeros(4, np.uint8) for _ in range(2)]

    def exchange(rank, grouped):
        if grouped:
            with rank.group():
                rank.send(buffers[rank.rank], 1 - rank.rank, "swap")
                rank.receive(got[rank.rank], 1 - rank.rank, "swap")
        else:
            rank.send(buffers[rank.rank], 1 - rank.rank, "swap")
            rank.receive(got[rank.rank], 1 - rank.rank, "swap")

    failures = run(LoopbackWorld(2, 0.2), *[lambda r: exchange(r, False)] * 2)
    assert all(isinstance(failure, CommunicationError) for failure in failures)
    assert "rank 0 send of 4 bytes to rank 1 (swap)" in str(failures[0])
    assert "rank 1 send of 4 bytes to rank 0 (swap)" in str(failures[0])
    run(LoopbackWorld(2, 5.0), *[lambda r: exchange(r, True)] * 2)
    assert [buffer[0] for buffer in got] == [1, 0]


def test_different_sizes_are_an_error_on_both_sides():
    failures = run(
        LoopbackWorld(2, 5.0),
        lambda rank: rank.send(np.zeros(3, np.uint8), 1, "three"),
        lambda rank: rank.receive(np.zeros(4, np.uint8), 0, "four"),
    )
    for failure in failures:
        assert "sizes differ" in str(failure) and "(three) meets" in str(failure)


def test_a_rank_may_not_talk_to_itself_or_to_strangers():
    rank = LoopbackWorld(2).communicator(0)
    for peer in (0, 2):
        with pytest.raises(ValueError, match="must be another of the 2 ranks"):
            rank.send(np.zeros(1, np.uint8), peer, "x")
    with pytest.raises(ValueError, match="rank must be in 0..1"):
        LoopbackWorld(2).communicator(2)
