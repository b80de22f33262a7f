"""The error that names an extra."""

import pytest

from alpa_meta.extras import EXTRA_OF, MissingExtraError, missing, named, require


def test_the_extra_of_a_missing_module_is_named():
    with pytest.raises(MissingExtraError, match=r"figures needs matplotlib, .*alpa-meta\[report\]"):
        raise missing("matplotlib", "figures")
    assert isinstance(named(ModuleNotFoundError(name="flax"), "it"), MissingExtraError)


def test_modules_of_no_extra_keep_their_error():
    error = ModuleNotFoundError(name="nobody")
    assert named(error, "it") is error


def test_nothing_is_missing_here():
    require("the tests", *EXTRA_OF)
