"""Garbage collection settings are put back."""

import gc
import weakref

import pytest

from alpa_meta.planning import collection_pause
from alpa_meta.planning.collection_pause import collections_paused


def test_collections_are_put_off_and_the_settings_put_back():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), collections_paused():
        assert min(gc.get_threshold()) > 10**6
        raise RuntimeError
    assert gc.get_threshold() == before


def test_what_earlier_plannings_left_is_freed_once_it_is_much(monkeypatch):
    class Node:
        itself: "Node"

    monkeypatch.setattr(collection_pause, "_left", 0)
    left = Node()
    left.itself = left
    alive = weakref.ref(left)
    with collections_paused():
        del left
        kept = [[number] for number in range(1_000)]
    with collections_paused():
        assert alive() is not None
    monkeypatch.setattr(collection_pause, "_MOST_LEFT", len(kept) // 2)
    with collections_paused():
        assert alive() is None


def test_what_the_caller_froze_is_counted_once(monkeypatch):
    counts = iter([5])
    monkeypatch.setattr(collection_pause, "_is_frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts))
    for _ in range(3):
        with collections_paused():
            pass
    assert not list(counts)
