"""What is refused before a run spends any time."""

import pytest

from alpa_meta import PlanError
from alpa_meta.trainer.run_folder import RunFolder


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
