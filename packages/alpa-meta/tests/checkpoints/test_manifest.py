import tracemalloc

import pytest

from alpa_interchange import document
from alpa_meta.checkpoints.manifest import CheckpointError, read_manifest, write_manifest


def test_a_manifest_stays_sound_under_later_minor_versions_of_the_schema(tmp_path, monkeypatch):
    write_manifest(tmp_path, 3, {"a": 1}, [], {"d/x": (2, "1" * 64)})
    major, minor = document.SCHEMA_VERSION
    monkeypatch.setattr(document, "SCHEMA_VERSION", (major, minor + 1))
    found = read_manifest(tmp_path)
    assert (found.step, found.settings) == (3, '{"a": 1}')
    assert [(one.path, one.size) for one in found.files] == [("d/x", 2)]


@pytest.mark.parametrize("sha", ["", "0", "0" * 64, "f" * 64])
def test_a_sum_that_is_none_is_refused(tmp_path, sha):
    write_manifest(tmp_path, 3, {}, [], {})
    path = tmp_path / "alpa.json"
    own = read_manifest(tmp_path).sha256
    path.write_text(path.read_text().replace(own, sha))
    with pytest.raises(CheckpointError, match="does not have the SHA-256 it names"):
        read_manifest(tmp_path)


def test_a_sum_that_is_shorter_is_refused_before_it_is_replaced(tmp_path):
    # 64 zeros for each of a million letters would be 64 MB
    write_manifest(tmp_path, 3, {"e": "e" * 10**6}, [], {})
    path = tmp_path / "alpa.json"
    path.write_text(path.read_text().replace(read_manifest(tmp_path).sha256, "e"))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="does not have the SHA-256 it names"):
            read_manifest(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 30e6
