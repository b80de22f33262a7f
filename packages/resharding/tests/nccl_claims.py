"""What is true of the NCCL transport, as functions that a mistake makes fail (on `fake_cuda`)."""

import time

import numpy as np
import pytest
from fake_cuda import Memory

from resharding import HostExecutor, Network, TransportError, plan
from resharding.hops import LEAST_CHUNK_BYTES, steps_of
from resharding.nccl_library import unique_id
from resharding.nccl_transport import NcclPair, NcclTransport


def owners(task):
    return {
        device: f"host {host}"
        for placed in (task.source, task.target)
        for device, host in zip(placed.devices, placed.hosts, strict=True)
    }


def team_of(world, tasks, **options):
    """Return a transport per host, which know the pairs of meshes of the tasks."""
    owner_of = {device: name for task in tasks for device, name in owners(task).items()}
    pairs = [NcclPair(t.source.devices, t.target.devices, unique_id()) for t in tasks]
    ends = {}
    for number, name in enumerate(dict.fromkeys(owner_of.values())):
        devices = [device for device, owner in owner_of.items() if owner == name]
        ends[name] = NcclTransport(name, devices, Memory(world), pause=3600.0, **options)
        with world.of(name):
            ends[name].connect(pairs[::-1] if number % 2 else pairs, owner_of)
    world.check_orders()
    return ends


def post(world, ends, made, shards, key="k"):
    """Post a plan on all hosts; return what is under way, and what receives."""
    memory = Memory(world)
    sendings, receivings = [], {}
    for name, end in ends.items():
        with world.of(name):
            mine = {d: memory.tile(s, d) for d, s in shards.items() if owners(made.task)[d] == name}
            if mine:
                sendings.append(end.send(key, made, lambda mine=mine: mine))
            del mine
            if name in [owners(made.task)[d] for d in made.task.target.devices]:
                receivings[name] = end.receive(key, made)
    return sendings, receivings


def finish(world, ends, sendings, receivings):
    """Run all streams; return the tiles by device."""
    memory = Memory(world)
    results = {d: a for each in receivings.values() for d, a in each.result(5).items()}
    results = {device: memory.read(array) for device, array in results.items()}
    world.run()
    for end in ends.values():
        end.look()
    for sending in sendings:
        sending.result(5)
    return {device: array.values for device, array in results.items()}


def check_equal(world, task, strategy, shards, dtype=None):
    made = plan(task, Network(latency=1e-6), strategy)
    ends = team_of(world, [task])
    found = finish(world, ends, *post(world, ends, made, shards))
    for device, expected in HostExecutor(made).run(shards).items():
        np.testing.assert_array_equal(found[device], expected)


def pair_of(make_task):
    """Return a broadcast from a device to two hosts of two devices each."""
    return make_task((64, 8), (1, 1), "R R", (2, 2), "R R", dtype="uint32")


def streams(make_world, make_task, make_shards):
    """Everything is there when it is read, and stays until it was."""
    for seed in range(6):
        for task in (
            pair_of(make_task),
            make_task((12, 8), (2, 2), "S0 R", (2, 2), "R S01", dtype="uint32"),
        ):
            check_equal(make_world(seed), task, "broadcast", make_shards(task)[0])


def old_cupy(make_world, make_task, make_shards):
    """CuPy 13 has ids of signed chars, CuPy 14 bytes."""
    for version in ("13.6.0", "14.2.0"):
        task = pair_of(make_task)
        check_equal(make_world(0, version), task, "broadcast", make_shards(task)[0])


def both_ways(make_world, make_task, make_shards):
    """Two meshes that both send before they receive do not wait for each other."""
    world = make_world()
    forth = make_task((8,), (1, 1), "R", (1, 1), "R", dtype="uint32")
    back = type(forth)(tensor=forth.tensor, source=forth.target, target=forth.source)
    ends, memory = team_of(world, [forth, back]), Memory(world)
    plans, values = {"host 0": (forth, back), "host 1": (back, forth)}, np.arange(8, dtype="u4")
    sendings = []
    for name, (out, _) in plans.items():
        (device,) = out.source.devices
        with world.of(name):
            sendings.append(
                ends[name].send(name, plan(out), lambda d=device: {d: memory.tile(values, d)})
            )
    others, receivings = {"host 0": "host 1", "host 1": "host 0"}, {}
    for name, (_, into) in plans.items():
        with world.of(name):
            receivings[name] = ends[name].receive(others[name], plan(into))
    for array in finish(world, ends, sendings, receivings).values():
        np.testing.assert_array_equal(array, values)


def dead_peer(make_world, make_task, make_shards):
    """An error that CuPy does not know is reported with the tensor and the peers."""
    world, task = make_world(), pair_of(make_task)
    ends = team_of(world, [task])
    sendings, receivings = post(
        world, ends, plan(task, Network(), "broadcast"), make_shards(task)[0]
    )
    world.status = 6
    for end in ends.values():
        end.look()
    with pytest.raises(TransportError, match="k between host 0 and host 1.*a peer has gone"):
        sendings[0].result(1)
    assert all(one.aborted for one in world.communicators.values())
    world.run()


def too_long(make_world, make_task, make_shards):
    """What takes too long is given up, and the peers are named."""
    world, task = make_world(), pair_of(make_task)
    ends = team_of(world, [task], timeout=0.0)
    made = plan(task, Network(), "broadcast")
    with world.of("host 1"):
        receiving = ends["host 1"].receive("k", made)
    receiving.result(1)  # the arrays are there, their values are not
    time.sleep(0.01)
    ends["host 1"].look()
    with pytest.raises(TransportError, match="host 1 waited 0 s for k from .*host 0"):
        receiving.result(1)
    assert all(world.communicators[key].aborted for key in world.communicators if key[1] in (1, 2))
    world.run()
    with pytest.raises(TransportError, match="was given up"), world.of("host 1"):
        ends["host 1"].receive("l", made).result(1)


def half_a_group(make_world, make_task, make_shards):
    """When an operation is refused in a group, what was started with it is given up."""
    world, task = make_world(), make_task((8, 8), (1, 2), "S1 R", (1, 2), "R S1", dtype="uint32")
    ends = team_of(world, [task])
    world.fail_at = 1
    sendings, _ = post(world, {"host 0": ends["host 0"]}, plan(task), make_shards(task)[0])
    with pytest.raises(TransportError, match="SYSTEM_ERROR"):
        sendings[0].result(1)
    assert world.group is None
    world.run()


def few_kernels(make_world, make_task, make_shards):
    """2 GiB take some hundred launches, not 16,384."""
    task = make_task((1 << 29,), (1, 1), "R", (3, 1), "R")
    steps = steps_of(plan(task, Network(), "broadcast"))
    assert len(steps) <= (1 << 31) // LEAST_CHUNK_BYTES + 3
    assert min(hop.end - hop.begin for step in steps for hop in step) >= 4 << 20


def no_probes(make_world, make_task, make_shards):
    """No id is made that nobody uses: each starts a thread that listens."""
    world, task = make_world(), pair_of(make_task)
    team_of(world, [task])
    assert world.ids == 1


def in_progress(make_world, make_task, make_shards):
    """What NCCL is still busy with has not failed, though CuPy knows no name for it."""
    world, task = make_world(), pair_of(make_task)
    ends = team_of(world, [task])
    made, (shards, _) = plan(task, Network(), "broadcast"), make_shards(task)
    sendings, receivings = post(world, ends, made, shards)
    world.status = 7
    for end in ends.values():
        end.look()
    world.status = 0
    for device, array in finish(world, ends, sendings, receivings).items():
        np.testing.assert_array_equal(array, HostExecutor(made).run(shards)[device])


def launch_order(make_world, make_task, make_shards, monkeypatch):
    """Communicators of a device start what they are given in the order in which it was issued."""
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    world, task = make_world(), pair_of(make_task)
    team_of(world, [task])
    assert all(one.in_issue_order for one in world.communicators.values())


def no_copies(make_world, make_task, make_shards):
    """A tile that is sent and received whole is read and written where XLA has it."""
    world, task = make_world(), make_task((64, 8), (1, 1), "R R", (1, 2), "R R", dtype="uint32")
    ends, shards = team_of(world, [task]), make_shards(task)[0]
    sendings, receivings = post(world, ends, plan(task, Network(), "broadcast"), shards)
    assert len(world.allocations) == 3  # the tile that is sent, and one on each receiver
    results = {d: a for each in receivings.values() for d, a in each.result(5).items()}
    world.run()
    received = {id(one.bytes) for one in world.allocations if one.device in results}
    assert {id(array.allocation.bytes) for array in results.values()} == received
    del sendings


CLAIMS = (
    streams,
    in_progress,
    launch_order,
    no_copies,
    old_cupy,
    both_ways,
    dead_peer,
    too_long,
    half_a_group,
    few_kernels,
    no_probes,
)
