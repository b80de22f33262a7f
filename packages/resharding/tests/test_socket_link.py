import os
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from resharding import TransportError
from resharding.socket_link import SocketLink, new_token


@pytest.fixture
def links():
    """Return a function that makes two links, and what arrives and gets lost at the second."""
    made: list[SocketLink] = []

    def make(tokens=None, elsewhere=False):
        token = new_token()
        a, b = (SocketLink(name, t) for name, t in zip("ab", tokens or (token, token), strict=True))
        arrived: list[tuple[Any, ...]] = []
        lost: list[tuple[Any, ...]] = []
        changed = threading.Condition()

        def note(found):
            def add(*what):
                with changed:
                    found.append(what)
                    changed.notify_all()

            return add

        def supply(peer, key, number, begin, end):
            if key != "k":
                raise TransportError(f"no {key}")
            return iter([memoryview(b"0123456789")[begin:end]])

        a.open(lambda *_: None, note(lost), supply)
        b.open(note(arrived), note(lost), supply)
        for one, other in ((a, b), (b, a)):
            at = other.address
            one.connect({other.name: evolve(at, machine="elsewhere") if elsewhere else at})
        made.extend((a, b))

        def wait(found, count=1):
            with changed:
                assert changed.wait_for(lambda: len(found) >= count, 100)
            return found

        return a, b, arrived, lost, wait

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_messages_arrive_in_order_over_unix_and_tcp_sockets(links, elsewhere):
    a, _, arrived, _, wait = links(elsewhere=elsewhere)
    for k in range(20):
        a.post("b", {"k": k}, np.full(k, k, np.uint8))
    wait(arrived, 20)
    for k, (sender, header, payload) in enumerate(arrived):
        assert sender == "a" and header == {"k": k}
        assert payload.nbytes == k and np.all(payload == k)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_fetches_are_answered_with_the_bytes_or_the_reason_why_not(links, elsewhere):
    a, *_ = links(elsewhere=elsewhere)
    got = bytearray(4)
    a.fetch("b", "k", 0, 3, [memoryview(got)[:1], memoryview(got)[1:]])
    assert got == b"3456"
    with pytest.raises(TransportError, match="no other"):
        a.fetch("b", "other", 0, 0, [memoryview(got)])
    a.fetch("b", "k", 0, 0, [memoryview(got)])
    assert got == b"0123"


def test_answers_over_tcp_do_not_wait_to_be_acknowledged(links):
    a, b, *_ = links(elsewhere=True)
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        b.fetch("a", "k", 0, 0, [memoryview(bytearray(10))])
        seconds.append(time.perf_counter() - begin)
    # a delayed acknowledgement takes 0.04 s, and nearly every answer waits for one; others wait
    # for a processor now and then
    assert statistics.median(seconds) < 0.02


def test_the_memory_of_the_same_machine_is_read_and_that_of_others_is_not(links):
    a, *_ = links()
    assert a.reads("b") and a.lanes("b") == 2
    assert a.shares("b")
    a.connect({"b": evolve(a.address, probe=bytes(32))})
    assert not a.shares("b")
    assert not a.reads("b")  # another process has that number, or its memory is closed to us
    a, *_ = links(elsewhere=True)
    assert not a.reads("b") and a.lanes("b") == 4


def test_who_does_not_know_the_token_is_refused_by_either_side(links):
    a, b, arrived, lost, wait = links((new_token(), new_token()))
    a.post("b", {"k": 1})
    ((peer, reason),) = wait(lost)
    assert peer == "b" and "refused the connection" in reason and not arrived
    fake = socket.create_server(("127.0.0.1", 0))

    def answer():
        opened, _ = fake.accept()
        opened.sendall(bytes(32) + bytes(32))
        opened.recv(200)
        time.sleep(0.2)
        opened.close()

    threading.Thread(target=answer, daemon=True).start()
    at = evolve(b.address, port=fake.getsockname()[1], machine="elsewhere")
    a.connect({"c": at})
    with pytest.raises(ConnectionError, match="does not know the token"):
        a.fetch("c", "k", 0, 0, [memoryview(bytearray(4))])
    fake.close()


def test_a_message_too_large_to_be_true_ends_the_connection(links):
    a, _, _, lost, wait = links()
    opened = a._connect("b", "messages")
    opened.sendall(b"\xff" * 12)
    ((peer, reason),) = wait(lost)
    assert peer == "a" and "a message announces" in reason


def test_strangers_are_few_and_cannot_stay(links, monkeypatch):
    monkeypatch.setattr("resharding.socket_link._PATIENCE", 0.3)
    a, b, arrived, _, wait = links()
    strangers = [socket.create_connection((b.address.host, b.address.port)) for _ in range(70)]
    for one in strangers:
        one.settimeout(60)
        while one.recv(64):
            pass
        one.close()
    a.post("b", {"k": 1})
    wait(arrived)


def test_who_only_stays_does_not_shut_out_who_knows_the_token(links):
    a, b, *_ = links()
    strangers = [socket.create_connection((b.address.host, b.address.port)) for _ in range(80)]
    for one in strangers[-64:]:
        one.recv(32)  # so that the link has them all
    got = bytearray(4)
    a.fetch("b", "k", 0, 0, [memoryview(got)])  # at once, not after the 30 s of a stranger
    assert got == b"0123"
    for one in strangers:
        one.close()


def test_a_stranger_who_sends_byte_by_byte_gets_no_more_time(links, monkeypatch):
    monkeypatch.setattr("resharding.socket_link._PATIENCE", 0.5)
    _, b, *_ = links()
    stranger = socket.create_connection((b.address.host, b.address.port))
    begun = time.monotonic()
    with pytest.raises(OSError):  # what is sent to a closed connection
        for _ in range(60):  # of the 68 bytes that are read before the length of a name
            stranger.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - begun < 5
    stranger.close()


def test_a_peer_that_answers_byte_by_byte_is_given_up(links, monkeypatch):
    monkeypatch.setattr("resharding.socket_link._PATIENCE", 0.5)
    a, b, *_ = links()
    fake = socket.create_server(("127.0.0.1", 0))

    def answer():
        opened, _ = fake.accept()
        with opened:
            try:
                while True:
                    opened.sendall(b"x")
                    time.sleep(0.1)
            except OSError:
                pass

    threading.Thread(target=answer, daemon=True).start()
    a.connect({"b": evolve(b.address, port=fake.getsockname()[1], machine="elsewhere")})
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        a.fetch("b", "k", 0, 0, [memoryview(bytearray(4))])
    assert time.monotonic() - begun < 2  # 32 bytes would take 3.2 s
    fake.close()


def test_a_call_that_a_stranger_passes_on_to_another_is_refused(links):
    """Who took over a port from a dead worker passes what comes on to one that lives, and back."""
    a, b, arrived, *_ = links(elsewhere=True)
    relay = socket.create_server(("127.0.0.1", 0))
    passed = []

    def serve():
        called, _ = relay.accept()
        onward = socket.create_connection((b.address.host, b.address.port))

        def pass_on(one, other):
            try:
                while some := one.recv(1 << 16):
                    passed.append(some)
                    other.sendall(some)
            except OSError:
                pass
            for end in (one, other):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=pass_on, args=(called, onward), daemon=True).start()
        pass_on(onward, called)

    threading.Thread(target=serve, daemon=True).start()
    a.connect({"c": evolve(b.address, port=relay.getsockname()[1], machine="elsewhere")})
    with pytest.raises(ConnectionError, match="refused the connection|reset"):
        a.fetch("c", "k", 0, 0, [memoryview(bytearray(4))])
    assert len(passed) >= 2 and not arrived  # a challenge and its answer, nothing else
    relay.close()


@pytest.mark.parametrize("text", [b"[" * 50_000, b"{", b"\xff\xfe"])
def test_a_header_that_is_no_message_ends_the_connection_and_is_told(links, text):
    a, _, _, lost, wait = links()
    opened = a._connect("b", "messages")
    opened.sendall(struct.pack("<IQ", len(text), 0) + text)
    ((peer, _),) = wait(lost)
    assert peer == "a" and opened.recv(1) == b""


def test_unknown_peers_and_tokens_of_another_length_are_refused(links):
    a, *_ = links()
    with pytest.raises(TransportError, match="a knows no peer 'c'"):
        a.post("c", {})
    with pytest.raises(ValueError, match="token must have 32 bytes, got 3"):
        SocketLink("a", b"abc")


def test_closing_from_two_threads_closes_each_file_once(links, monkeypatch):
    a, *_ = links()
    closed, close = [], os.close

    def slowly(number):
        closed.append(number)
        time.sleep(0.1)
        close(number)

    monkeypatch.setattr("resharding.socket_link.os.close", slowly)
    threads = [threading.Thread(target=a.close) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(closed) == 1
