"""The NCCL transport on a fake CUDA whose streams run late and in harmful orders.

`MUTATIONS` puts the mistakes back that the earlier version had, one at a time: for each, what is
true of the transport must fail.
"""

import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
from attrs import evolve
from fake_cuda import Hang, Memory, World

from resharding import HostExecutor, Network, TransportError, nccl_library, nccl_transport, plan
from resharding.cases import random_task
from resharding.hops import LEAST_CHUNK_BYTES, steps_of
from resharding.nccl_library import NcclRanks, as_cupy_id, unique_id
from resharding.nccl_transport import NcclPair, NcclTransport


@pytest.fixture
def make_world(monkeypatch):
    """Return a function that installs a fake CuPy of a version."""

    def make(seed=0, version="14.2.0"):
        world = World(seed, version)
        for name, module in world.cupy().items():
            monkeypatch.setitem(sys.modules, name, module)
        return world

    return make


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


@pytest.mark.parametrize("strategy", ["send_recv", "broadcast", "global_all_gather", "auto"])
def test_gpus_get_the_tiles_the_host_executor_gives(make_world, make_shards, monkeypatch, strategy):
    monkeypatch.setattr("resharding.hops.LEAST_CHUNK_BYTES", 16)
    for seed in range(12):
        task = random_task(seed, longest=16)
        task = evolve(task, tensor=evolve(task.tensor, dtype="uint16"))
        check_equal(make_world(seed), task, strategy, make_shards(task)[0])


# ---------------------------------------------------------------------- mistakes put back


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


CLAIMS = (
    streams,
    old_cupy,
    both_ways,
    dead_peer,
    too_long,
    half_a_group,
    few_kernels,
    no_probes,
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_what_is_true_of_the_transport(make_world, make_task, make_shards, claim):
    claim(make_world, make_task, make_shards)


def without_waiting_for_xla(patch):
    export = Memory.export

    def wrong(self, array, stream):
        made = export(self, array, stream)
        self.world.streams[stream].queue.pop()
        return made

    patch.setattr(Memory, "export", wrong)


def without_event(patch):
    patch.setattr(Memory, "adopt", lambda self, array, event: array)


def without_keeping(patch):
    real = NcclTransport._mark

    def wrong(self, flight, steps, rank_of):
        flight.keep.clear()
        real(self, flight, steps, rank_of)

    patch.setattr(NcclTransport, "_mark", wrong)


def on_the_current_device(patch):
    real = NcclRanks.__init__

    def wrong(self, *arguments):
        real(self, *arguments)
        self.device_of = dict.fromkeys(self.device_of, 0)

    patch.setattr(NcclRanks, "__init__", wrong)


def a_group_for_each_rank(patch):
    real = NcclRanks.issue

    def wrong(self, operations, label):
        for rank in dict.fromkeys(each.rank for each in operations):
            real(self, [each for each in operations if each.rank == rank], label)

    patch.setattr(NcclRanks, "issue", wrong)


def communicators_outside_a_group(patch):
    @contextmanager
    def nothing(self, label):
        yield

    real = NcclRanks._group
    patch.setattr(
        NcclRanks,
        "_group",
        lambda self, label: (nothing if "making" in label else real)(self, label),
    )


def communicators_in_any_order(patch):
    patch.setattr(nccl_transport, "sorted", lambda pairs, key=None: list(pairs), raising=False)


def one_stream_for_both_ways(patch):
    real = NcclTransport.connect

    def wrong(self, pairs, owner_of):
        real(self, pairs, owner_of)
        first = next(iter(self._pairs.values()))
        self._pairs = {ends: (pair, first[1]) for ends, (pair, _) in self._pairs.items()}

    patch.setattr(NcclTransport, "connect", wrong)


def unsigned_ids(patch):
    patch.setattr(nccl_library, "as_cupy_id", lambda identity, version: tuple(identity))


def ids_as_bytes(patch):
    patch.setattr(nccl_library, "as_cupy_id", lambda identity, version: identity)


def only_known_statuses(patch):
    patch.setattr(nccl_library, "KeyError", ZeroDivisionError, raising=False)


def without_abort(patch):
    patch.setattr(NcclRanks, "abort", lambda self: None)


def without_deadline(patch):
    patch.setattr(nccl_transport.time, "monotonic", lambda: 0.0)


def small_chunks(patch):
    patch.setattr("resharding.hops.LEAST_CHUNK_BYTES", 1)


def a_probe(patch):
    real = NcclRanks.__init__

    def wrong(self, *arguments):
        unique_id()
        real(self, *arguments)

    patch.setattr(NcclRanks, "__init__", wrong)


MUTATIONS = (
    (without_waiting_for_xla, streams),
    (without_event, streams),
    (without_keeping, streams),
    (on_the_current_device, streams),
    (a_group_for_each_rank, streams),
    (communicators_outside_a_group, streams),
    (communicators_in_any_order, both_ways),
    (one_stream_for_both_ways, both_ways),
    (unsigned_ids, old_cupy),
    (ids_as_bytes, old_cupy),
    (only_known_statuses, dead_peer),
    (without_abort, dead_peer),
    (without_abort, half_a_group),
    (without_deadline, too_long),
    (small_chunks, few_kernels),
    (a_probe, no_probes),
)


@pytest.mark.parametrize(
    ("mistake", "claim"), MUTATIONS, ids=lambda given: getattr(given, "__name__", None)
)
def test_every_mistake_is_found(make_world, make_task, make_shards, monkeypatch, mistake, claim):
    mistake(monkeypatch)
    found = (AssertionError, Hang, TransportError, OverflowError, TypeError, KeyError)
    with pytest.raises((*found, pytest.fail.Exception)):
        claim(make_world, make_task, make_shards)


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
