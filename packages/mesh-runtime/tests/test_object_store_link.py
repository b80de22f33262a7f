import threading
import types
from typing import Any

import numpy as np
import pytest

from mesh_runtime.object_store_link import ObjectStoreLink


@pytest.fixture
def pair():
    """Return two endpoints whose "actors" deliver when called, as Ray's do."""
    ends = {name: ObjectStoreLink(name, lambda call: call()) for name in ("a", "b")}

    def actor(end):
        def remote(sender, number, header, payload):
            return lambda: end.deliver(sender, number, header, payload)

        def options(concurrency_group):
            assert concurrency_group == "data"  # beside the group in which steps run
            return types.SimpleNamespace(remote=remote)

        return types.SimpleNamespace(deliver=types.SimpleNamespace(options=options))

    for end in ends.values():
        end.connect({name: actor(other) for name, other in ends.items()})
    yield ends["a"], ends["b"]
    for end in ends.values():
        end.close()


def opened(link):
    """Return lists that fill with what arrives and what is lost, and a function that waits."""
    arrived: list[tuple[Any, ...]] = []
    lost: list[tuple[Any, ...]] = []
    changed = threading.Condition()

    def note(found):
        def add(*what):
            with changed:
                found.append(what)
                changed.notify_all()

        return add

    def wait(found, count=1):
        with changed:
            assert changed.wait_for(lambda: len(found) >= count, 10)
        return found

    link.open(note(arrived), note(lost), None)
    return arrived, lost, wait


def test_messages_arrive_in_order_with_all_their_bytes(pair):
    a, b = pair
    arrived, _, wait = opened(b)
    for k in range(5):
        a.post("b", {"k": k}, np.full(k, k, np.uint8))
    wait(arrived, 5)
    for k, (sender, header, payload) in enumerate(arrived):
        assert (sender, header, payload.tolist()) == ("a", {"k": k}, [k] * k)


def test_a_message_that_comes_twice_is_handed_on_once(pair):
    _, b = pair
    arrived, _, _ = opened(b)
    for number in (1, 1, 2, 1):
        b.deliver("a", number, {"number": number}, np.empty(0, np.uint8))
    assert [header["number"] for _, header, _ in arrived] == [1, 2]


def test_failures_name_the_peer(pair):
    a, _ = pair
    _, lost, wait = opened(a)
    with pytest.raises(RuntimeError, match="a knows no peer 'c'"):
        a.post("c", {})
    a.connect({"b": None})
    a.post("b", {})
    ((peer, reason),) = wait(lost)
    assert peer == "b" and "it cannot be called" in reason


def test_nothing_is_read_or_fetched(pair):
    a, _ = pair
    assert a.most_inline is None and not a.reads("b") and a.lanes("b") == 1
    with pytest.raises(RuntimeError, match="cannot read the memory of b"):
        a.read("b", 0, None, None, 0, 0)
    with pytest.raises(RuntimeError, match="cannot fetch k from b"):
        a.fetch("b", "k", 0, 0, [])
