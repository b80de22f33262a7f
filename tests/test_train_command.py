"""`alpa train` as a user runs it, on a model small enough for a test."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_interchange import load
from alpa_interchange.plan import ParallelPlan
from alpa_meta.api import ParallelStep
from alpa_meta.cli import run

SIZES = (
    *("--layers", "2", "--hidden", "16", "--heads", "2", "--context", "32", "--batch", "16"),
    *("--stages", "1", "--microbatches", "1"),  # quick to plan; a later --stages overrides it
)
PIPELINE = ("--stages", "2", "--microbatches", "2")


def _train(folder, *arguments):
    assert run(["train", *SIZES, "--out", str(folder), *arguments]) == 0


def _as_planned(run):
    return "--compare", "0", "--plan", str(run / "plan.json")


def _losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _state(folder):
    newest = sorted((folder / "checkpoint").glob("step-*"))[-1]
    found = jax.tree_util.tree_flatten_with_path(alpa.restore(newest))[0]
    return newest.name, {jax.tree_util.keystr(path): leaf for path, leaf in found}


@pytest.fixture(scope="module")
def whole_and_output(tmp_path_factory):
    """Return the folder of a run of 12 steps without an interruption, and what it printed; the
    state that it begins with is made once."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    made, init = [], ParallelStep.init

    def counted(*given):
        made.append(given)
        return init(*given)

    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelStep, "init", counted)
        _train(folder, "--steps", "12", "--compare", "3")
    assert len(made) == 1
    return folder, output.getvalue()


@pytest.fixture(scope="module")
def whole(whole_and_output):
    return whole_and_output[0]


@pytest.fixture(scope="module")
def half(whole, tmp_path_factory):
    """Return the folder of the first six of these steps, not to be written to."""
    folder = tmp_path_factory.mktemp("half") / "run"
    _train(folder, "--steps", "6", "--schedule-steps", "12", *_as_planned(whole))
    return folder


def test_a_run_writes_all_its_files(whole):
    plan = load(whole / "plan.json", ParallelPlan)
    assert plan.cluster.num_devices == 8
    assert len(_losses(whole)) == 12
    for name in ("loss.png", "timeline.png", "plan.png"):
        assert matplotlib.image.imread(whole / name).std() > 0.01
    assert _state(whole)[0] == "step-00000012"
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoint",
        "loss.png",
        "metrics.jsonl",
        "metrics.prom",
        "plan.json",
        "plan.png",
        "timeline.json",
        "timeline.png",
    ]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(whole, half, tmp_path):
    folder = shutil.copytree(half, tmp_path / "run")
    assert run(["train", "--resume", str(folder), "--steps", "12", "--compare", "0"]) == 0
    assert _losses(folder) == _losses(whole)
    expected, found = _state(whole), _state(folder)
    assert expected[0] == found[0]
    assert expected[1].keys() == found[1].keys()
    for name, array in expected[1].items():
        assert array.dtype == found[1][name].dtype
        assert array.tobytes() == found[1][name].tobytes(), name


def test_the_output_says_everything_in_order(whole_and_output):
    text = whole_and_output[1]
    places = [
        text.find(part)
        for part in (
            "cluster host:8",
            "byte trigram",
            "logical mesh",
            "predicted memory per device",
            "sharding over the mesh",
            "predicted:",
            "proven:",
            "step    12/12",
            "trained 12 steps",
            "bytes: does not beat the trigram's",
            "the same 3 steps on one device: losses differ by at most",
            "wrote",
        )
    ]
    assert -1 not in places
    assert places == sorted(places)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Return a saved plan of two stages and the folder of a run of 12 steps by it."""
    saved, folder = (tmp_path_factory.mktemp("pipeline") / name for name in ("plan.json", "run"))
    assert run(["plan", *SIZES, *PIPELINE, "--out", str(saved)]) == 0
    _train(folder, "--steps", "12", "--compare", "0", *PIPELINE, "--plan", str(saved))
    return saved, folder


def test_a_pipeline_trains_as_the_default_plan_does(whole, pipeline):
    _, folder = pipeline
    assert load(folder / "plan.json", ParallelPlan).num_stages == 2
    # float32 sums in another order; Adam divides by small second moments, which amplifies it
    np.testing.assert_allclose(_losses(folder), _losses(whole), rtol=2e-3)


def test_another_plan_resumes_the_checkpoint(whole, half, tmp_path):
    folder = shutil.copytree(half, tmp_path / "run")
    arguments = ["--steps", "12", *PIPELINE, "--compare", "0"]
    assert run(["train", "--resume", str(folder), *arguments]) == 0
    assert load(folder / "plan.json", ParallelPlan).num_stages == 2
    np.testing.assert_allclose(_losses(folder), _losses(whole), rtol=2e-3)


def test_a_saved_plan_is_run_as_it_is(pipeline):
    saved, folder = pipeline
    wanted, used = load(saved, ParallelPlan), load(folder / "plan.json", ParallelPlan)
    assert used.stage_plan == wanted.stage_plan
    assert [used.state_specs for used in used.shardings] == [
        wanted.state_specs for wanted in wanted.shardings
    ]


@pytest.mark.sample(cluster=1)
@pytest.mark.parametrize("cluster", ["a100-80gb:16", "h100:8"])
def test_plans_are_made_for_clusters_that_are_not_here(tmp_path, capsys, cluster):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["--cluster", cluster, "--out", str(out), "--picture", str(picture)]
    assert run(["plan", *SIZES, *arguments]) == 0
    assert "predicted:" in capsys.readouterr().out
    assert load(out, ParallelPlan).cluster.name == cluster
    assert picture.exists()
    assert run(["show", str(out)]) == 0
    assert "logical mesh" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in ("train", "plan", "show", "clusters", "calibrate"))


def test_the_working_folder_stays_clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *SIZES, "--cluster", "host:2"]) == 0
    assert list(Path().iterdir()) == []
