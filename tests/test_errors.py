"""Mistakes of the user: one message on stderr, exit status 2, nothing half-written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from alpa_meta.checkpoints.manifest import read_manifest
from alpa_meta.cli import run

SIZES = ("--layers", "2", "--hidden", "16", "--heads", "2", "--context", "32", "--batch", "8")
SMALL = (*SIZES, "--stages", "1")
FAST = (*SMALL, "--steps", "4", "--compare", "2")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return the folder of a finished run, not to be written to."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(["train", *FAST, "--cluster", "host:2", "--out", str(folder)]) == 0
    return folder


def _refused(capsys, *arguments):
    """Return the message of a command that must be refused and leave nothing behind."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert run(list(arguments)) == 2
    assert sorted(Path().rglob("*")) == before
    return capsys.readouterr().err


def test_an_unknown_preset_names_what_is_known(capsys):
    for command in ("train", "plan"):
        message = _refused(capsys, command, "--cluster", "h1000:8")
        assert "'h1000:8' is not a preset" in message
        assert "h100" in message


def test_more_host_devices_than_the_process_has(capsys):
    message = _refused(capsys, "train", *FAST, "--cluster", "host:16")
    assert "16 host devices" in message
    assert "host:8" in message


def test_training_on_a_cluster_whose_devices_are_not_here(capsys):
    message = _refused(capsys, "train", *FAST, "--cluster", "h100:16")
    assert "16" in message


def test_a_batch_that_the_microbatches_do_not_divide(capsys):
    message = _refused(capsys, "train", *FAST, "--microbatches", "3")
    assert "8" in message
    assert "3" in message


def test_more_stages_than_layers_or_devices(capsys):
    message = _refused(capsys, "train", *SIZES, "--stages", "11")
    assert "11" in message  # as many devices lack, and no smaller number of meshes may share them


def test_memory_that_no_plan_fits_says_what_is_missing(capsys):
    message = _refused(capsys, "plan", *SMALL, "--microbatches", "1", "--memory", "10KiB")
    assert "the state alone takes" in message
    assert "a device has (memory), or use at least" in message


def test_amounts_and_sizes_that_make_no_sense(capsys):
    assert "16GiB" in _refused(capsys, "plan", "--memory", "lots")
    assert "divisible by num_heads" in _refused(capsys, "plan", "--hidden", "10", "--heads", "3")
    assert "float32" in _refused(capsys, "plan", "--dtype", "int3")


@pytest.mark.parametrize(
    ("content", "expected"),
    [("{", "not valid JSON"), ('{"a": 1}', "must be an object"), ("\x00\xff", "")],
)
def test_a_corrupted_plan(capsys, content, expected):
    Path("plan.json").write_text(content)
    for arguments in (("show", "plan.json"), ("train", *FAST, "--plan", "plan.json")):
        message = _refused(capsys, *arguments)
        assert "plan.json" in message
        assert expected in message


def test_a_plan_that_is_missing(capsys):
    assert "cannot be read" in _refused(capsys, "train", *FAST, "--plan", "absent.json")


def test_a_plan_of_another_program_is_refused_with_a_diff(capsys, finished_run):
    other = [argument if argument != "16" else "32" for argument in FAST]
    message = _refused(capsys, "train", *other, "--plan", str(finished_run / "plan.json"))
    assert "16" in message
    assert "32" in message


def test_a_document_of_another_kind_is_no_plan(capsys, finished_run):
    document = json.loads((finished_run / "plan.json").read_text())
    Path("other.json").write_text(json.dumps({**document, "schema": "LayerGraph"}))
    message = _refused(capsys, "show", "other.json")
    assert "'LayerGraph'" in message
    assert "'ParallelPlan'" in message


def test_a_folder_that_is_no_run_cannot_be_resumed(capsys):
    assert "not the folder of a run" in _refused(capsys, "train", "--resume", "absent")
    Path("empty").mkdir()
    assert "holds no checkpoint" in _refused(capsys, "train", "--resume", "empty")


def test_a_damaged_checkpoint_is_refused(capsys, finished_run):
    shutil.copytree(finished_run, "run")
    arrays = max(Path("run").rglob("ocdbt.process_0/d/*"), key=lambda one: one.stat().st_size)
    content = bytearray(arrays.read_bytes())
    content[len(content) // 2] ^= 255
    arrays.write_bytes(content)
    assert "is damaged" in _refused(capsys, "train", "--resume", "run", "--steps", "8")


def test_a_checkpoint_of_another_model_is_refused(capsys, finished_run):
    shutil.copytree(finished_run, "run")
    (path,) = Path("run").rglob("alpa.json")
    manifest = read_manifest(path.parent)
    settings = json.loads(manifest.settings)
    settings["run"]["model"]["num_layers"] = 1
    path.write_text(evolve(manifest, settings=json.dumps(settings)).sealed())
    message = _refused(capsys, "train", "--resume", "run", "--steps", "8")
    assert "belongs to another program" in message
    assert "layer_1" in message


def test_settings_cannot_be_changed_while_resuming(capsys, finished_run):
    message = _refused(capsys, "train", "--resume", str(finished_run), "--hidden", "32")
    assert "hidden" in message


def test_the_command_itself_ends_with_status_two():
    found = subprocess.run(
        [sys.executable, "-c", "from alpa_meta.cli import main; main()", "show", "absent.json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr == "alpa: absent.json: cannot be read: No such file or directory\n"
