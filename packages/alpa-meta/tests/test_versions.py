"""Packages of one release work together."""

import pytest

from alpa_meta.versions import PACKAGES, check_versions, installed_versions


def test_patches_of_one_release_are_taken():
    check_versions(dict.fromkeys(PACKAGES, "0.1.0") | {"stage-dp": "0.1.3"})


def test_another_release_is_refused_by_name():
    with pytest.raises(ImportError, match=r"release, 0\.1, but installed are stage-dp 0\.2\.0"):
        check_versions(dict.fromkeys(PACKAGES, "0.1.0") | {"stage-dp": "0.2.0"})


def test_packages_run_from_their_sources_have_no_version():
    check_versions({})
    assert set(installed_versions()) <= set(PACKAGES)
