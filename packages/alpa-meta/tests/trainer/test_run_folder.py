"""What is refused before a run spends any time."""

from pathlib import Path

import pytest

from alpa_meta import PlanError
from alpa_meta.trainer.run_folder import RunFolder
from alpa_meta.writable import check_file


def test_a_folder_that_can_be_made_is_accepted_and_not_made(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    folder.check_writable()
    folder.check_room(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    "full disk, folder that cannot be written",
    "a warning while training, refused at the start",
)
def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="run: cannot be written: Not a directory; choose another"):
        RunFolder(tmp_path / "file" / "run").check_writable()


@pytest.mark.fault(
    "full disk, folder that cannot be written",
    "a warning while training, refused at the start",
)
def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(PlanError, match="a checkpoint takes .* TiB, but only .* are free there"):
        RunFolder(tmp_path).check_room(1 << 63)


@pytest.mark.parametrize("name", [".", "..", "", "../{}"])
def test_the_folder_that_alpa_runs_in_is_not_moved_aside(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(PlanError, match="the folder that alpa runs in.* choose another"):
        RunFolder(Path(name.format(tmp_path.name))).check_new()


def test_a_folder_of_files_that_no_run_wrote_is_not_moved_aside(tmp_path):
    folder = RunFolder(tmp_path / "results")
    folder.check_new()
    folder.path.mkdir()
    folder.check_new()
    (folder.path / "thesis.tex").write_text("")
    with pytest.raises(PlanError, match="results: holds files that are no run's .thesis.tex.;"):
        folder.check_new()
    (folder.path / ".metrics.prom.partial").write_text("")  # of a run that was killed early
    folder.check_new()


@pytest.mark.parametrize(
    ("place", "why"),
    [("none/x.prom", "No such file"), ("", "Is a directory"), ("file/x", "Not a directory")],
)
def test_metrics_that_cannot_be_written_are_refused(tmp_path, place, why):
    (tmp_path / "file").write_text("")
    check_file(None, "--metrics")
    check_file(tmp_path / "x.prom", "--metrics")
    with pytest.raises(PlanError, match=f"cannot be written: {why}.*--metrics"):
        check_file(tmp_path / place, "--metrics")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
