import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from attrs import evolve

from resharding import (
    HostExecutor,
    HostTransport,
    Network,
    TransportError,
    incoming,
    new_token,
    outgoing,
    plan,
)
from resharding.cases import random_task
from resharding.routes import part_of
from resharding.socket_link import SocketLink


@pytest.fixture
def team():
    """Return a function that makes transports which know each other."""
    made: list[HostTransport] = []

    def make(names, owner_of, elsewhere=False, **options):
        token = new_token()
        ends = {name: HostTransport(name, token, **options) for name in names}
        made.extend(ends.values())
        addresses = {name: end.address for name, end in ends.items()}
        for name, end in ends.items():
            far = {
                other: evolve(at, machine=f"that of {other}") if elsewhere else at
                for other, at in addresses.items()
                if other != name
            }
            end.connect(far, owner_of)
        return ends

    yield make
    for end in made:
        end.close()


def owners(task):
    pairs = [
        (device, f"host {host}")
        for placed in (task.source, task.target)
        for device, host in zip(placed.devices, placed.hosts, strict=True)
    ]
    return dict(pairs)


def run(ends, made, shards, key="k"):
    """Return the tiles of all target devices after a plan."""
    sendings = [
        end.send(key, made, lambda: shards)
        for end in ends.values()
        if not {d for d, name in owners(made.task).items() if name == end.name}.isdisjoint(shards)
    ]
    receivings = [end.receive(key, made) for end in ends.values()]
    dtype = next(iter(shards.values())).dtype
    found = {}
    for each in receivings:
        for device, tile in each.result(100).items():
            found[device] = tile.view(dtype)
    for sending in sendings:
        sending.result(100)
    return found


@pytest.mark.parametrize(
    ("source", "target", "leaves"),
    [
        (((1, 1), "R R"), ((2, 1), "S0 R"), True),
        (((1, 2), "S1 R"), ((1, 1), "R R"), True),
        (((2, 1), "S0 R"), ((1, 1), "R R"), False),
    ],
    ids=["one sender", "one sender and receiver", "one receiver"],
)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_transfer_starts_when_those_it_comes_after_have_left_its_process_or_are_done_there(
    team, make_task, make_shards, monkeypatch, source, target, leaves, elsewhere, checksum
):
    task = make_task((1 << 19, 2), *source, *target)
    made = plan(task, Network(issue="none"), "send_recv")
    first, second = made.transfers
    made = evolve(made, transfers=(first, evolve(second, after=(0,))))
    seen: list[tuple[str, int]] = []
    post, complete = SocketLink.post, incoming.Incoming._complete

    def note_offer(self, peer, header, *rest, **when):
        if header["kind"] == "offer":
            seen.extend(("offered", number) for number in header["numbers"])
        post(self, peer, header, *rest, **when)

    def note_end(self, fetch, number, region):
        seen.append(("came", number))
        time.sleep(0.1)  # what does not wait comes first
        complete(self, fetch, number, region)
        seen.append(("done", number))

    monkeypatch.setattr(SocketLink, "post", note_offer)
    monkeypatch.setattr(incoming.Incoming, "_complete", note_end)
    shards, whole = make_shards(task)
    names = list(dict.fromkeys(owners(task).values()))
    found = run(team(names, owners(task), elsewhere, checksum=checksum), made, shards)
    for device, tile in found.items():
        expected = HostExecutor(made).run(shards)[device]
        np.testing.assert_array_equal(tile.reshape(expected.shape), expected)
    if leaves:
        assert seen.index(("offered", 0)) < seen.index(("offered", 1)) < seen.index(("done", 0))
    else:
        assert seen.index(("came", 1)) > seen.index(("done", 0))


@pytest.mark.parametrize("inline", [0, 1 << 16])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    "strategy",
    ["send_recv", "broadcast", "global_all_gather", "tile_host_gather", "tile_tree", "auto"],
)
def test_processes_get_the_tiles_the_host_executor_gives(
    team, monkeypatch, make_shards, inline, elsewhere, strategy
):
    monkeypatch.setattr(SocketLink, "most_inline", inline)
    monkeypatch.setattr(outgoing, "CHUNK_BYTES", 64)
    for seed in range(4):
        task = random_task(seed, longest=24)
        made, (shards, _) = plan(task, Network(latency=1e-6), strategy), make_shards(task)
        owner_of = owners(task)
        ends = team(dict.fromkeys(owner_of.values()), owner_of, elsewhere, checksum=seed % 2 == 0)
        found = run(ends, made, shards)
        for device, expected in HostExecutor(made).run(shards).items():
            np.testing.assert_array_equal(found[device], expected.reshape(-1))


@pytest.mark.parametrize("shares", [False, True])
def test_boxes_of_any_run_length_go_from_memory_to_memory(
    team, monkeypatch, make_task, make_shards, shares
):
    if not shares:
        monkeypatch.setattr(SocketLink, "shares", lambda self, peer: False)
    monkeypatch.setattr(incoming, "_READ_BYTES", 100_000)
    for columns in (1 << 9, 1 << 14):  # halves of 1 and 32 KiB: packed, and run by run
        task = make_task((96, columns), (1, 2), "R S1", (1, 3), "S1 R")
        made, (shards, expected) = plan(task, Network(issue="none")), make_shards(task)
        found = run(team(("host 0", "host 1"), owners(task)), made, shards)
        for device, tile in expected.items():
            np.testing.assert_array_equal(found[device], tile.reshape(-1))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_host_of_a_broadcast_is_sent_each_byte_once(
    team, monkeypatch, make_task, make_shards, elsewhere
):
    monkeypatch.setattr(outgoing, "CHUNK_BYTES", 1 << 16)
    task = make_task((300, 1000), (1, 1), "R R", (3, 2), "R R", dtype="float32")
    made, (shards, expected) = plan(task, Network()), make_shards(task)
    ends = team(dict.fromkeys(owners(task).values()), owners(task), elsewhere)
    sent = []
    for end in ends.values():
        part = part_of(end.name, made, owners(task))
        sent += [(end.name, part.boxes[k].size) for k in part.sent]
        sent += [(end.name, part.boxes[k].size) for k, (_, to) in part.received.items() if to]
    assert sum(size for _, size in sent) == 3 * task.tensor.size
    assert sum(size for name, size in sent if name == "host 0") == task.tensor.size
    found = run(ends, made, shards)
    assert len({tile.ctypes.data for tile in found.values()}) == 3  # devices of a host share it
    for device, tile in expected.items():
        np.testing.assert_array_equal(found[device], tile.reshape(-1))


@pytest.fixture
def pair(team, make_task):
    """Return two transports of which the first sends a matrix of 1 MiB, and its plan."""

    def make(elsewhere=False, **options):
        task = make_task((1024, 256), (1, 1), "R R", (1, 1), "R R")
        ends = team(("host 0", "host 1"), owners(task), elsewhere, **options)
        return ends["host 0"], ends["host 1"], plan(task)

    return make


def matrix(value):
    return lambda: {0: np.full((1024, 256), value, np.float32)}


def test_receives_and_sends_meet_by_key_in_any_order(pair):
    a, b, made = pair()
    sendings = [a.send(f"k{k}", made, matrix(k)) for k in range(3)]
    for k in (2, 0, 1):
        (tile,) = b.receive(f"k{k}", made).result(100).values()
        assert np.all(tile.view(np.float32) == k)
    for sending in sendings:
        sending.result(100)


def test_nothing_is_fetched_beyond_the_window_unless_somebody_waits_for_it(pair):
    a, b, made = pair(window=1 << 20)
    sendings = [a.send(f"k{k}", made, matrix(k)) for k in range(3)]
    receivings = [b.receive(f"k{k}", made) for k in range(3)]
    sendings[0].result(100)
    with pytest.raises(TransportError, match="host 0 waited 0.2 s for host 1 to fetch k1"):
        sendings[1].result(0.2)
    (tile,) = receivings[2].result(100).values()  # beyond the window, but asked for
    assert np.all(tile.view(np.float32) == 2)
    receivings[0].result(100)
    sendings[1].result(100)  # there is room now
    receivings[1].result(100)


def test_a_receive_that_was_given_up_makes_room(pair):
    a, b, made = pair(window=1 << 20)
    a.send("k0", made, matrix(0))
    first, second = b.receive("k0", made), b.receive("k1", made)
    first.cancel()
    a.send("k1", made, matrix(1)).result(100)
    (tile,) = second.result(100).values()
    assert np.all(tile.view(np.float32) == 1)


def test_tiles_are_taken_before_anybody_fetches_them(pair):
    a, b, made = pair()
    sending = a.send("k", made, matrix(7))
    sending.taken(100)
    with pytest.raises(TransportError, match="waited 0.1 s for host 1 to fetch k"):
        sending.result(0.1)
    b.receive("k", made).result(100)
    sending.result(100)


def test_waiting_in_vain_names_tensor_and_peer(pair):
    _, b, made = pair()
    with pytest.raises(
        TransportError, match=r"host 1 waited 0.1 s for k from host 0 and nothing came"
    ):
        b.receive("k", made).result(0.1)


def test_a_peer_that_goes_away_fails_those_who_wait_for_it(pair):
    a, b, made = pair()
    a.send("first", made, matrix(0))
    b.receive("first", made).result(100)
    waiting = b.receive("second", made)
    threading.Timer(0.1, a.close).start()
    with pytest.raises(TransportError, match="second from host 0, but its connection ended"):
        waiting.result(100)
    with pytest.raises(TransportError, match="was closed"):
        a.send("third", made, matrix(0)).result(100)


def test_a_peer_that_goes_away_fails_those_who_send_to_it(pair):
    a, b, made = pair()
    sending = a.send("k", made, matrix(0))
    sending.taken(100)
    time.sleep(0.1)
    b.close()
    with pytest.raises(TransportError, match="host 0 cannot send to host 1"):
        sending.result(100)


def test_a_sender_without_tiles_tells_the_receiver_why(pair):
    a, b, made = pair()

    def broken():
        raise RuntimeError("boom")

    sending = a.send("k", made, broken)
    with pytest.raises(TransportError, match="host 1, k: host 0 failed to send it: boom"):
        b.receive("k", made).result(100)
    with pytest.raises(RuntimeError, match="boom"):
        sending.result(100)
    wrong = a.send("l", made, lambda: {0: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"device 0 must have the shape \(1024, 256\), got \(3,\)"):
        wrong.result(100)


def test_programs_that_differ_are_refused_with_both_named(pair):
    a, b, made = pair()
    a.send("k", made, matrix(0), program="two")
    with pytest.raises(TransportError, match="is of plan one, but host 0 runs plan two"):
        b.receive("k", made, program="one").result(100)


@pytest.mark.parametrize("way", ["mapped", "read", "fetch"])
def test_a_box_that_changes_on_the_way_is_found_by_its_checksum(pair, monkeypatch, way):
    a, b, made = pair(way == "fetch", checksum=True)
    real, post, written = getattr(SocketLink, way), SocketLink.post, []

    def spoiled(*arguments):
        found = real(*arguments)
        if way == "read":
            arguments[4].memory.fill(1)
        elif way == "fetch":
            np.asarray(arguments[-1][0]).fill(1)
        else:
            written.append(found)
        return found

    def posted(self, peer, header, *rest, **when):
        if header["kind"] == "written":
            written[0].fill(1)
        post(self, peer, header, *rest, **when)

    monkeypatch.setattr(SocketLink, way, spoiled)
    monkeypatch.setattr(SocketLink, "post", posted)
    if way == "read":
        monkeypatch.setattr(SocketLink, "shares", lambda self, peer: False)
    a.send("k", made, matrix(3))
    with pytest.raises(TransportError, match="the checksum of box 0 is wrong"):
        b.receive("k", made).result(100)


def test_a_sender_that_cannot_map_the_tile_has_it_read(pair, monkeypatch):
    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(SocketLink, "mapped", refuse)
    a, b, made = pair()
    a.send("k", made, matrix(3))
    (tile,) = b.receive("k", made).result(100).values()
    assert np.all(tile.view(np.float32) == 3)


def test_memory_that_a_peer_may_still_write_to_is_not_used_again(pair, monkeypatch):
    a, b, made = pair()
    let_go, real = threading.Event(), SocketLink.mapped

    def slow(*arguments):
        let_go.wait(100)
        return real(*arguments)

    monkeypatch.setattr(SocketLink, "mapped", slow)
    a.send("k", made, matrix(3))
    receiving = b.receive("k", made)
    with pytest.raises(TransportError, match="nothing came"):
        receiving.result(0.3)
    del receiving
    others = [b._incoming._memory.lend(1 << 20) for _ in range(3)]
    for other in others:
        other[:] = 0
    let_go.set()
    monkeypatch.undo()
    a.send("l", made, matrix(4)).taken(100)
    b.receive("l", made).result(100)
    assert not any(other.any() for other in others)


def test_many_transfers_cross_in_both_directions(team, make_task):
    forth = make_task((64, 256), (1, 1), "R R", (1, 1), "R R")
    back = type(forth)(tensor=forth.tensor, source=forth.target, target=forth.source)
    ends = team(("host 0", "host 1"), owners(forth), window=1 << 17)
    plans = {"host 0": (plan(forth), plan(back)), "host 1": (plan(back), plan(forth))}

    def work(name):
        out, into = plans[name]
        (device,) = out.task.source.devices
        tile = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
        other = "host 1" if name == "host 0" else "host 0"
        receivings = [ends[name].receive(f"{other} {k}", into) for k in range(50)]
        sendings = [
            ends[name].send(f"{name} {k}", out, lambda k=k: {device: tile + k}) for k in range(50)
        ]
        for k, each in enumerate(receivings):
            (got,) = each.result(100).values()
            np.testing.assert_array_equal(got.view(np.float32), tile.reshape(-1) + k)
        for each in sendings:
            each.result(100)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, plans))
