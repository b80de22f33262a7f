import threading

import numpy as np
import pytest
from attrs import evolve

from mesh_runtime.data_plane import DataPlane, DataPlaneError, new_token


@pytest.fixture
def pair():
    token = new_token()
    ends = [DataPlane(name, token) for name in ("a", "b")]
    for end in ends:
        end.connect({other.name: other.address for other in ends})
    yield ends
    for end in ends:
        end.close()


def message(key, array):
    return lambda: ({"key": key}, [array.reshape(-1).view(np.uint8)])


@pytest.mark.parametrize("local", [True, False])
def test_bytes_arrive_unchanged_over_unix_and_tcp_sockets(pair, local):
    a, b = pair
    if not local:
        a.connect({"b": evolve(b.address, machine="elsewhere")})
    sent = np.random.default_rng(0).normal(size=300_001)
    a.send("b", message("k", sent)).result(10)
    header, (payload,) = b.take("k", "a", 10)
    assert header["key"] == "k" and payload.ctypes.data % 64 == 0
    np.testing.assert_array_equal(payload.view(np.float64), sent)


def test_messages_are_taken_by_key_in_any_order(pair):
    a, b = pair
    for k in range(3):
        a.send("b", message(f"k{k}", np.array([k], np.uint8)))
    assert [int(b.take(f"k{k}", "a", 10)[1][0][0]) for k in (2, 0, 1)] == [2, 0, 1]


def test_empty_payloads_arrive(pair):
    a, b = pair
    a.send("b", lambda: ({"key": "nothing"}, []))
    assert b.take("nothing", "a", 10)[1][0].nbytes == 0


def test_waiting_in_vain_names_key_and_sender(pair):
    with pytest.raises(DataPlaneError, match=r"b waited 0.1 s for k from a and nothing came"):
        pair[1].take("k", "a", 0.1)


def test_a_closed_sender_fails_who_waits_for_it(pair):
    a, b = pair
    a.send("b", message("first", np.zeros(1, np.uint8))).result(10)
    b.take("first", "a", 10)
    threading.Timer(0.1, a.close).start()
    with pytest.raises(DataPlaneError, match="waits for second from a, but its connection ended"):
        b.take("second", "a", 10)


def test_sending_to_a_closed_or_unknown_peer_fails(pair):
    a, b = pair
    with pytest.raises(DataPlaneError, match="a knows no peer 'c'"):
        a.send("c", message("k", np.zeros(1, np.uint8)))
    b.close()
    with pytest.raises(DataPlaneError, match="a cannot send to b"):
        a.send("b", message("k", np.zeros(1, np.uint8))).result(10)


def test_strangers_without_the_token_are_cut_off(pair):
    b = pair[1]
    stranger = DataPlane("a", new_token())
    stranger.connect({"b": b.address})
    stranger.send("b", message("k", np.zeros(1, np.uint8)))
    with pytest.raises(DataPlaneError, match="nothing came"):
        b.take("k", "a", 0.3)
    stranger.close()


def test_a_message_too_large_to_be_true_ends_the_connection(pair):
    a, b = pair
    opened = a.open_connection("b")
    opened.sendall(b"\xff" * 12)
    opened.settimeout(5)
    with pytest.raises(DataPlaneError, match=r"connection ended \(a message announces"):
        b.take("k", "a", 5)
    assert opened.recv(1) == b""
    opened.close()


def test_a_failing_message_maker_fails_only_its_own_send(pair):
    a, b = pair

    def broken():
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        a.send("b", broken).result(10)
    a.send("b", message("k", np.ones(1, np.uint8))).result(10)
    assert b.take("k", "a", 10)[1][0][0] == 1


def test_tokens_have_a_fixed_length():
    with pytest.raises(ValueError, match="token must have 32 bytes, got 3"):
        DataPlane("a", b"abc")
