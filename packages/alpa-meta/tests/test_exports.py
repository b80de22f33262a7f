"""The names of the package."""

import pytest

import alpa_meta
from alpa_meta.exports import PLACES


def test_every_public_name_can_be_had():
    assert sorted(PLACES) == alpa_meta.__all__
    for name in alpa_meta.__all__:
        assert getattr(alpa_meta, name) is not None
    assert set(PLACES) <= set(dir(alpa_meta))


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="'alpa_meta' has no attribute 'paralelize'"):
        alpa_meta.paralelize  # noqa: B018
