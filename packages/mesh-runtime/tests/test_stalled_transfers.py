"""A peer that is alive but sends or takes nothing: real processes, one of which is stopped."""

import os
import signal
import time
from contextlib import contextmanager
from multiprocessing import get_context

import numpy as np
import pytest

pytest.importorskip("resharding", reason="its transport is handed to the workers")

import stalling_mesh

import resharding
from mesh_runtime import StepError

TIMEOUT = 2.0
stalled = pytest.mark.fault(
    "transfer stalled: a peer that is alive but sends or takes nothing",
    "both ends name the peer and the tensor within `step_timeout`",
)


@contextmanager
def beside(mesh, stops_in_task, timeout=TIMEOUT):
    """Give the worker of a mesh here, and the other mesh's process, ready for a step."""
    context, token = get_context("forkserver"), resharding.new_token()
    context.set_forkserver_preload(["stalling_mesh"])  # imports jax once
    ours, theirs = context.Pipe()
    other = context.Process(
        target=stalling_mesh.be, args=(theirs, 1 - mesh, token, stops_in_task), daemon=True
    )
    other.start()
    worker = stalling_mesh.worker(mesh, token)
    try:
        names = (f"mesh {1 - mesh} host 0", worker.name)
        addresses = dict(zip(names, (ours.recv(), worker.transport.address), strict=True))
        ours.send(addresses)
        stalling_mesh.install(worker, addresses, timeout)
        assert ours.recv() == "ready"
        yield worker, other, ours
    finally:
        other.kill()
        other.join(10)
        worker.close()


def fails(worker, message):
    begun = time.monotonic()
    with pytest.raises(StepError, match=message):
        stalling_mesh.run(worker, 1)
    assert TIMEOUT <= time.monotonic() - begun < TIMEOUT + 30  # a busy machine is late


def is_stopped(process):
    with open(f"/proc/{process.pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "T"


@stalled
def test_a_peer_that_stops_before_it_sends_is_named_with_the_tensor_within_the_timeout():
    with beside(1, stops_in_task=True) as (worker, other, _):
        fails(
            worker,
            r"mesh 1, instruction 0 \(receive of microbatch 0 of h@0 from mesh 0\) on host 0 "
            r"failed: mesh 1 host 0 waited 2 s for step 1: h@0 from mesh 0 to mesh 1, message 0 "
            r"from mesh 0 host 0 and nothing came",
        )
        assert is_stopped(other)  # alive, and its connections are open


@stalled
def test_a_peer_that_stops_in_the_middle_of_a_tensor_is_named_with_it_within_the_timeout():
    with beside(1, stops_in_task=False) as (worker, other, _):
        link = worker.transport._link
        link.after, link.action = 3, lambda: os.kill(other.pid, signal.SIGSTOP)
        fails(worker, r"waited 2 s for step 1: h@0 from mesh 0 to mesh 1.* from mesh 0 host 0 and")
        assert is_stopped(other) and 3 <= link.fetched < 8


@stalled
def test_a_peer_that_stops_before_it_fetches_is_named_by_the_one_that_sends():
    with beside(0, stops_in_task=False) as (worker, other, _):
        os.kill(other.pid, signal.SIGSTOP)
        fails(
            worker,
            r"mesh 0, instruction 1 \(send of microbatch 0 of h@0 to mesh 1\) on host 0 failed: "
            r"mesh 0 host 0 waited 2 s for mesh 1 host 0 to fetch step 1: h@0 from mesh 0 to mesh",
        )


def test_a_peer_that_goes_on_in_time_is_waited_for():
    with beside(1, stops_in_task=False, timeout=100.0) as (worker, other, pipe):
        link = worker.transport._link

        def pause():
            os.kill(other.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(other.pid, signal.SIGCONT)

        link.after, link.action = 3, pause
        ((_, total),) = stalling_mesh.run(worker, 1)["total"]
        assert np.asarray(total) == stalling_mesh.SHAPE[0]
        assert pipe.recv() == "done"
        pipe.send(None)
