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


def test_what_earlier_plannings_left_is_freed():
    class Node:
        itself: "Node"

    left = Node()
    left.itself = left
    alive = weakref.ref(left)
    with collections_paused():
        del left
    for _ in range(collection_pause._EVERY):
        with collections_paused():
            pass
    assert alive() is None
