import os
import subprocess
import sys

from alpa_meta.checkpoints.places import checkpoint_paths, commit, later_than, new_partial


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def put(folder, step, keep=None):
    later = later_than(folder, step)
    return commit(new_partial(folder), step, later, keep)


def test_the_newest_ones_stay(tmp_path):
    for step in (5, 10, 100000000):
        put(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-00000010", "step-100000000"]


def test_a_step_saved_again_replaces_the_former_one_by_a_rename_alone(tmp_path):
    assert [put(tmp_path, 5).name for _ in range(3)] == [
        "step-00000005",
        "step-00000005.1",
        "step-00000005.2",
    ]
    assert names(tmp_path) == ["step-00000005.2"]


def test_later_ones_are_of_a_course_that_was_given_up(tmp_path):
    for step in (5, 10, 15):
        put(tmp_path, step)
    put(tmp_path, 8, keep=2)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-00000005", "step-00000008"]
    assert names(tmp_path)[:2] == ["stale-step-00000010", "stale-step-00000015"]


def test_what_dead_processes_left_is_removed_and_what_others_write_is_not(tmp_path):
    program = (
        "import sys, pathlib; from alpa_meta.checkpoints.places import new_partial;"
        "print(new_partial(pathlib.Path(sys.argv[1])).name)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    left = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    here = new_partial(tmp_path)
    (tmp_path / ".partial-abc").mkdir()
    elsewhere = tmp_path / ".partial-another.host-1-0f"
    elsewhere.mkdir()
    assert left not in names(tmp_path)
    new_partial(tmp_path)
    assert here.is_dir() and elsewhere.is_dir() and ".partial-abc" not in names(tmp_path)
    os.utime(elsewhere, (0, 0))
    new_partial(tmp_path)
    assert not elsewhere.exists()
