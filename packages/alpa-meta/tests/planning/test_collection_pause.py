"""Garbage collection settings are put back."""

import gc

import pytest

from alpa_meta.planning.collection_pause import collections_paused


def test_collections_are_put_off_and_the_settings_put_back():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), collections_paused():
        assert min(gc.get_threshold()) > 10**6
        raise RuntimeError
    assert gc.get_threshold() == before
