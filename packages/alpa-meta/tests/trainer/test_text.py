import numpy as np
import pytest

from alpa_meta.trainer.text import batch_at, read_text, spaced_windows


def _library(root, count=60):
    for number in range(count):
        folder = root / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_text(f"x = {number}\n" * 20)
    return root


def test_the_same_files_give_the_same_text_and_fingerprint(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = read_text(_library(tmp_path / "a")), read_text(_library(tmp_path / "b"))
    assert first.fingerprint == second.fingerprint
    np.testing.assert_array_equal(first.train, second.train)


def test_the_parts_are_split_by_file(tmp_path):
    text = read_text(_library(tmp_path))
    assert text.num_train_files + text.num_held_out_files == 60
    train = set(bytes(text.train).split(b"\0"))
    held_out = set(bytes(text.held_out).split(b"\0"))
    assert len(train) == text.num_train_files
    assert not train & held_out


def test_large_files_tests_and_other_files_are_left_out(tmp_path):
    library = _library(tmp_path)
    before = read_text(library, max_file_bytes=1000).fingerprint
    (library / "large.py").write_text("y = 1\n" * 1000)
    (library / "test").mkdir()
    (library / "test" / "test_it.py").write_text("z = 1\n")
    (library / "notes.txt").write_text("notes")
    assert read_text(library, max_file_bytes=1000).fingerprint == before


def test_the_training_part_is_cut_at_the_limit_and_the_held_out_part_is_not(tmp_path):
    library = _library(tmp_path)
    whole, limited = read_text(library), read_text(library, max_train_bytes=1000)
    assert limited.num_train_files < whole.num_train_files
    assert len(limited.train) < 1000 + 300
    np.testing.assert_array_equal(limited.held_out, whole.held_out)


def test_a_folder_without_python_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one training and one held-out"):
        read_text(tmp_path)


def test_the_standard_library_gives_at_least_two_million_bytes():
    text = read_text(max_train_bytes=2_000_000)
    assert len(text.train) >= 2_000_000
    assert len(text.held_out) > 200_000


def test_a_batch_is_a_function_of_step_and_seed_only():
    part = np.arange(10_000, dtype=np.int64).astype(np.uint8)
    first = batch_at(part, 7, seed=1, batch_size=4, length=16)
    np.testing.assert_array_equal(first, batch_at(part, 7, seed=1, batch_size=4, length=16))
    assert first.shape == (4, 17)
    assert (first != batch_at(part, 8, seed=1, batch_size=4, length=16)).any()
    assert (first != batch_at(part, 7, seed=2, batch_size=4, length=16)).any()


def test_windows_are_consecutive_bytes_of_the_part():
    part = np.arange(250, dtype=np.uint8)
    for row in batch_at(part, 0, seed=0, batch_size=8, length=32):
        np.testing.assert_array_equal(np.diff(row.astype(int)), 1)


def test_spaced_windows_start_where_they_say():
    part = np.arange(200, dtype=np.uint8)
    windows, starts = spaced_windows(part, num_windows=5, length=10)
    np.testing.assert_array_equal(windows[:, 0], starts)
    assert starts[0] == 2  # two bytes before it for the trigram
    assert windows[-1, -1] == 199


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="context must be at least 4 bytes shorter than the text"):
        batch_at(np.zeros(10, np.uint8), 0, seed=0, batch_size=1, length=10)
