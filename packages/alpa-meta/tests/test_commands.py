"""The commands of `alpa` and their list."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from alpa_meta.cli import run
from alpa_meta.command_list import EXAMPLES, MOUNTED

SOURCE = """
import jax, jax.numpy as jnp

def step(weights, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(weights)
    return weights - 0.1 * gradient, {"loss": loss}

def program():
    return step, jnp.eye(4) / 2, iter([jnp.ones((8, 4)), jnp.ones((8, 4))])

def decayed(state, x):
    weights, found = step(state["weights"], x * state["scale"])
    noise = jax.random.normal(state["key"], weights.shape) / 8
    key = jax.random.fold_in(state["key"], 1)
    return {"weights": weights + noise, "key": key, "scale": state["scale"] * 0.5}, found

def many():
    state = {"weights": jnp.eye(4) / 2, "key": jax.random.key(1), "scale": 1.0}
    return decayed, state, (jnp.full((8, 4), 1.0 + k) for k in range(9))

def batch():
    return step, jnp.eye(4) / 2, jnp.ones((8, 4))
"""

RAISING = """
def program():
    raise RuntimeError("no data")
def unlike():
    import jax.numpy as jnp
    def step(w, x):
        return w @ x, 1
    return step, jnp.ones((4, 8)), jnp.ones((4, 8))
"""


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    (tmp_path / "listed_programs.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", MOUNTED)
def test_the_list_says_what_the_command_says_of_itself(name):
    place, line = MOUNTED[name]
    module, _, function = place.partition(":")
    documented = getattr(import_module(module), function).__doc__
    assert " ".join(documented.strip().split("\n\n")[0].split()) == line


def test_the_list_has_every_command(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("train", "plan", "show", *MOUNTED):
        assert f"\n  {name} " in text


def test_a_mounted_command_has_its_own_help(capsys):
    assert run(["clusters", "--help"]) == 0
    assert "Preset, preset:devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--schedule", "1f2b"], "--schedule must be one of 1f1b, gpipe"),
        (["plan", "--dtype", "float8"], "'dtype' must be in ('float32', 'bfloat16')"),
        (["plan", "--memory", "-5"], "--memory: an amount of memory must be finite and above 0"),
        (["plan", "--cluster", "absent.toml"], "absent.toml: cannot be read: No such file"),
        (
            ["plan", "--token-slices", "0"],
            "--token-slices must be a whole number of at least 1",
        ),
        (["plan", "--cluster", "h100:8@x"], "what follows '@' must be from 1% to 99%"),
        (["train", "--on-nan", "stop"], "--on-nan must be one of raise, skip, got 'stop'"),
        (["train", "--context", "1000000"], "give a smaller --context"),
        (["plan", "--step", "math:pi"], "--step math:pi must name a function without arguments"),
        (["plan", "--step", "math:pi", "--model", "gpt"], "give one of them"),
        (["plan", "--model", "gpt-40b"], "among the published models are gpt"),
        (["plan", "--model", "gpt-39b", "--hidden", "8"], "a published one takes --layers"),
        (["plan", "--model", "gpt-39b", "--dtype", "int8"], "dtype must be one of float32"),
        (["compare", "llama:huge"], "no size 'huge' of llama"),
        (["compare"], "needs a model or --step"),
        (["audit", "--step", "math:pi"], "must name a function without arguments"),
        (["train", "--step", "listed_programs:program", "--layers", "2"], "--layers is of the"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence(arguments, message, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("alpa: ") and message in error
    assert "Traceback" not in error and "Attribute(" not in error


@pytest.mark.parametrize(
    ("program", "first", "last"),
    [
        ("raising:program", 'raising.py", line 3, in program', "RuntimeError: no data"),
        ("raising:unlike", 'raising.py", line 7, in step', "contracting dimensions"),
        ("importing:program", 'importing.py", line 1, in <module>', "No module named 'absent_pkg'"),
        ("unclosed:program", 'unclosed.py", line 1', "SyntaxError"),
    ],
)
def test_an_error_of_the_program_is_told_from_its_own_first_line(program, first, last, capsys):
    Path("raising.py").write_text(RAISING)
    Path("importing.py").write_text("import absent_pkg\n")
    Path("unclosed.py").write_text("def program(:\n")
    assert run(["plan", "--step", program, "--cluster", "h100:1"]) == 1
    error = capsys.readouterr().err
    told = error[error.index("alpa: the program raised an error") :].splitlines()
    assert first in " ".join(told[1:3]) and last in error
    assert "alpa_meta" not in "".join(told)


def test_the_help_of_a_command_has_examples_of_it(capsys):
    for name in ("train", "plan", "show", *MOUNTED):
        assert run([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"\n    {line}\n" in text for line in EXAMPLES[name])


def test_a_published_model_is_planned_by_its_name(capsys):
    arguments = ["--layers", "1", "--batch", "8", "--context", "64", "--cluster", "p3.16xlarge:2"]
    assert run(["plan", "--model", "gpt-125m", *arguments]) == 0
    assert "batch of 8" in capsys.readouterr().out
    assert run(["plan", "--help"]) == 0
    assert "gpt-39b" in capsys.readouterr().out


def test_a_program_of_ones_own_is_planned_and_trained(capsys):
    assert run(["plan", "--step", "listed_programs:batch", "--cluster", "h100:2x4"]) == 0
    assert "1 stage" in capsys.readouterr().out
    arguments = ["--stages", "1", "--microbatches", "1", "--out", "own"]
    assert run(["train", "--step", "listed_programs:program", *arguments]) == 0
    text = capsys.readouterr().out
    assert "the batches ended after 2 steps" in text
    assert "the same 2 steps on one device" in text
    rows = [json.loads(line) for line in Path("own/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["loss"] < rows[0]["loss"]
    assert run(["show", "own/plan.json"]) == 0


def test_a_program_of_ones_own_goes_on_from_its_checkpoint(capsys):
    train = ["train", "--cluster", "host:2", "--stages", "1", "--microbatches", "1"]
    own = [*train, "--step", "listed_programs:many"]
    assert run([*own, "--steps", "5", "--out", "whole"]) == 0
    assert run([*own, "--steps", "3", "--checkpoint-every", "2", "--out", "part"]) == 0
    assert "go on with: alpa train --resume part" in capsys.readouterr().out
    assert run(["train", "--cluster", "host:2", "--resume", "part", "--steps", "5"]) == 0
    assert "resuming part after step 3" in capsys.readouterr().out
    losses = [
        [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "part")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    names = {path.name for path in Path("part").iterdir()}
    assert {"plan.json", "loss.png", "timeline.png", "checkpoint"} <= names


def test_resuming_beyond_the_batches_of_an_iterator_is_refused(capsys):
    train = ["train", "--cluster", "host:2", "--step", "listed_programs:program"]
    assert run([*train, "--out", "part"]) == 0
    assert run([*train, "--resume", "part"]) == 2
    assert "has no batch after the 2 that the run has had" in capsys.readouterr().err


def test_another_program_cannot_go_on(capsys):
    train = ["train", "--cluster", "host:2"]
    assert run([*train, "--step", "listed_programs:batch", "--steps", "1", "--out", "part"]) == 0
    assert run([*train, "--step", "listed_programs:many", "--resume", "part"]) == 2
    error = capsys.readouterr().err
    assert "belongs to another program" in error and "'weights'" in error


def test_the_module_is_found_in_the_folder_the_command_runs_in(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", "from alpa_meta.cli import main; main()", "plan", "--step",
         "listed_programs:nothing"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    assert "module 'listed_programs' has no 'nothing'" in found.stderr


REFUSED = """
import sys
from alpa_meta.cli import run
assert run("plan --cluster h100:8 --model llama:small --memory 200MiB".split()) == 2
slow = {"alpa_meta.planning.planner", "flax", "ilp_sharding", "matplotlib"}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


def test_state_that_cannot_fit_is_refused_before_the_planner_is_imported():
    found = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "the state alone takes" in found.stderr


@pytest.mark.parametrize("option", ["--out", "--picture", "--schedule-csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_planned(
    option, tmp_path, capsys, monkeypatch
):
    def planned(*_, **__):
        raise AssertionError("it was planned")

    monkeypatch.setattr("alpa_meta.trainer.planning.parallel_step", planned)
    assert run(["plan", "--cluster", "host:2", option, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert f"cannot be written: Is a directory; choose another file with {option}" in said.err


@pytest.mark.parametrize("command", ["show", "explain"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_plan_is_read(
    command, tmp_path, capsys
):
    assert run([command, str(tmp_path / "plan.json"), "--picture", str(tmp_path)]) == 2
    assert "choose another file with --picture" in capsys.readouterr().err
