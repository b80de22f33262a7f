"""Garbage collection settings are put back."""

import gc

import pytest

from alpa_meta.planning.collection_pause import full_collections_paused


def test_full_collections_are_put_off_and_the_settings_put_back():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), full_collections_paused():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 10**6
        raise RuntimeError
    assert gc.get_threshold() == before
