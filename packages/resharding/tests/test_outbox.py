import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from resharding.outbox import Outbox


@pytest.fixture
def ends():
    """Return an outbox, the other end of its connection, and what it said of losses."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(100)
    lost: list[Any] = []
    outbox = Outbox(lambda: ours, lost.append)
    yield outbox, theirs, lost
    outbox.close()
    ours.close()
    theirs.close()


def received(end, size):
    found = b""
    while len(found) < size:
        found += end.recv(size - len(found))
    return found


def test_messages_come_in_order_also_those_that_fill_the_connection(ends):
    outbox, theirs, _ = ends
    large = np.arange(1 << 20, dtype=np.uint8)
    wanted = b""
    for k in range(6):
        outbox.post(bytes([k] * 5), large if k % 2 else None)
        wanted += bytes([k] * 5) + (large.tobytes() if k % 2 else b"")
    assert received(theirs, len(wanted)) == wanted


def test_once_connected_a_message_is_gone_when_it_was_posted(ends):
    outbox, theirs, _ = ends
    outbox.post(b"first", None)
    assert received(theirs, 5) == b"first"
    while outbox._waiting:
        time.sleep(0.001)
    outbox.post(b"second", None)
    theirs.setblocking(False)
    assert theirs.recv(6) == b"second"


def test_what_may_go_later_goes_with_the_next_message_or_by_itself(ends):
    outbox, theirs, _ = ends
    outbox.post(b"a", None, later=True)
    outbox.post(b"b", None, later=True)
    outbox.post(b"c", None)
    assert received(theirs, 3) == b"abc"
    begun = time.monotonic()
    outbox.post(b"d", None, later=True)
    assert received(theirs, 1) == b"d" and time.monotonic() - begun > 0.03
    outbox.post(b"e", None, later=True)
    outbox.flush()
    theirs.setblocking(False)
    assert received(theirs, 1) == b"e"


def test_a_connection_that_cannot_be_made_is_a_loss():
    told = threading.Event()

    def refuse():
        raise ConnectionRefusedError("nobody there")

    outbox = Outbox(refuse, lambda error: told.set())
    outbox.post(b"a", None)
    assert told.wait(100)
