"""Mistakes that the earlier NCCL transport made, put back one at a time: for each, what is true of
the transport must fail."""

from contextlib import contextmanager

import pytest
from fake_cuda import Hang, Memory
from nccl_claims import (
    CLAIMS,
    both_ways,
    dead_peer,
    few_kernels,
    half_a_group,
    in_progress,
    launch_order,
    no_copies,
    no_probes,
    old_cupy,
    streams,
    too_long,
)

from resharding import TransportError, nccl_library, nccl_transport
from resharding.hops import steps_of
from resharding.nccl_library import NcclRanks, unique_id
from resharding.nccl_transport import NcclTransport


@pytest.fixture
def check(make_world, make_task, make_shards, monkeypatch):
    """Return a function that checks a claim."""

    def run(claim):
        given = (make_world, make_task, make_shards)
        claim(*given, *([monkeypatch] if claim is launch_order else []))

    return run


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_what_is_true_of_the_transport(check, claim):
    check(claim)


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
    patch.setattr("resharding.nccl_transport.time.monotonic", lambda: 0.0)


def small_chunks(patch):
    patch.setattr("resharding.hops.LEAST_CHUNK_BYTES", 1)


def a_probe(patch):
    real = NcclRanks.__init__

    def wrong(self, *arguments):
        unique_id()
        real(self, *arguments)

    patch.setattr(NcclRanks, "__init__", wrong)


def waiting_for_a_stream(patch):
    real = NcclTransport._mark

    def wrong(self, flight, steps, rank_of):
        real(self, flight, steps, rank_of)
        for stream in flight.ranks.streams.values():
            stream.synchronize()

    patch.setattr(NcclTransport, "_mark", wrong)


def events_of_the_current_device(patch):
    def wrong(self, rank):
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.streams[rank])
        return event

    patch.setattr(NcclRanks, "event", wrong)


def without_asking_nccl(patch):
    patch.setattr(NcclRanks, "check", lambda self: None)


def busy_is_failed(patch):
    patch.setattr(nccl_library, "_IN_PROGRESS", -1)


def in_any_launch_order(patch):
    patch.setattr(nccl_library, "_LAUNCH_ORDER", "NCCL_SOMETHING_ELSE")


def copied(memory, array):
    return memory._computed(array.shape, array.dtype, array.allocation.device, lambda: array.values)


def a_staging_buffer_for_what_is_sent(patch):
    real = NcclTransport._held

    def wrong(self, made, steps, tiles):
        tiles = {device: copied(self._memory, tile) for device, tile in tiles.items()}
        return real(self, made, steps, tiles)

    patch.setattr(NcclTransport, "_held", wrong)


def a_staging_buffer_for_what_is_received(patch):
    real = NcclTransport._joined

    def wrong(self, *given):
        return {d: copied(self._memory, tile) for d, tile in real(self, *given).items()}

    patch.setattr(NcclTransport, "_joined", wrong)


def everything_at_once(patch):
    def wrong(made):
        return (tuple(hop for step in steps_of(made) for hop in step),)

    patch.setattr(nccl_transport, "steps_of", wrong)


def half_a_group_is_left_open(patch):
    @contextmanager
    def wrong(self, label):
        with self._named(label):
            self._nccl.groupStart()
            yield
            self._nccl.groupEnd()

    patch.setattr(NcclRanks, "_group", wrong)


MUTATIONS = (
    (waiting_for_a_stream, streams),
    (events_of_the_current_device, streams),
    (everything_at_once, streams),
    (without_asking_nccl, dead_peer),
    (busy_is_failed, in_progress),
    (in_any_launch_order, launch_order),
    (a_staging_buffer_for_what_is_sent, no_copies),
    (a_staging_buffer_for_what_is_received, no_copies),
    (half_a_group_is_left_open, half_a_group),
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
def test_every_mistake_is_found(check, monkeypatch, mistake, claim):
    mistake(monkeypatch)
    found = (AssertionError, Hang, TransportError, OverflowError, TypeError, KeyError)
    with pytest.raises((*found, pytest.fail.Exception)):
        check(claim)
