"""`alpa train --step` where a batch is not finite."""

import json
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.cli import EXIT_FAILED_RUN, run
from alpa_meta.execution.executable import Executable
from alpa_meta.stopping import Stopped

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np

def make():
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
        return w - gradient, loss

    def batches():
        for number in range(6):
            x = np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)
            x[7] = np.nan if number == 3 else x[7]
            yield x

    return step, jnp.eye(4), batches()
"""


BORN = """
import alpa_meta as alpa, jax, jax.numpy as jnp, numpy as np
from spoilt import make as plain

def rows(number, start, stop):
    return np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)[start:stop]

def born():
    batches = alpa.HostBatches(rows, jax.ShapeDtypeStruct((8, 4), np.float32))
    return plain()[0], lambda: jnp.eye(4), batches

def whole():
    return plain()[0], jnp.eye(4), (rows(number, 0, 8) for number in range(9))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "spoilt.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    options = "--cluster host:2 --stages 1 --microbatches 2 --compare 0".split()
    return lambda *more: run(["train", "--step", "spoilt:make", *options, *more])


def test_a_run_ends_at_a_spoilt_microbatch_with_the_state_before_it_saved(program, capsys):
    assert program("--on-nan", "raise") == EXIT_FAILED_RUN
    assert "alpa: step 4: microbatch 1 gave NaN or infinity" in capsys.readouterr().err
    found = alpa.read_checkpoint("run/checkpoint")
    assert found.step == 3
    assert np.all(np.isfinite(found.restore(jax.ShapeDtypeStruct((4, 4), jnp.float32))))


def test_a_run_goes_on_behind_a_step_that_is_skipped(program):
    with pytest.warns(alpa.NonFiniteWarning, match="step 4: microbatch 1"):
        assert program("--on-nan", "skip", "--steps", "6") == 0
    with open("run/metrics.jsonl") as lines:
        losses = [json.loads(line)["loss"] for line in lines]
    assert losses[3] is None and len(losses) == 6 and losses[5] is not None


def test_a_run_can_be_watched_and_its_last_step_traced(program, capsys, tmp_path):
    two = ["--cluster", "host:2", "--stages", "2", "--schedule", "1f1b"]
    assert program(*two, "--steps", "3", "--metrics", "newest.prom") == 0
    with open("run/metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    parts = {f"{part}_seconds" for part in ("compute", "update", "transfer", "bubble")}
    assert all(parts <= row.keys() for row in rows)
    capsys.readouterr()
    assert run(["top", "run", "--once", "--metrics", "newest.prom"]) == 0
    shown = capsys.readouterr().out
    assert "step 3 " in shown and "loss" in shown and "transfer" in shown
    assert "memory per device, as planned: stage 0" in shown
    assert run(["top", "run"]) == 2
    assert "run/metrics.prom: is not there" in capsys.readouterr().err

    assert run(["trace", "run"]) == 0
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["predicted", "executed"]
    runs = [
        {(one["tid"], one["name"]) for one in events if one["ph"] == "X" and one["pid"] == number}
        for number in (0, 1)
    ]
    assert {(0, "forward.0 #1"), (1, "backward.1 #0")} <= runs[0] & runs[1]
    (tmp_path / "run" / "timeline.json").unlink()
    assert run(["trace", "run"]) == 2
    assert (
        "it is written when a run has done all its steps, not when it is stopped"
        in capsys.readouterr().err
    )


def test_another_word_is_refused(program, capsys):
    assert program("--on-nan", "stop") == 2
    assert "on-nan must be one of raise, skip" in capsys.readouterr().err


def test_a_state_made_by_a_function_and_batches_read_by_hosts_train_as_arrays_do(
    program, tmp_path, capsys
):
    (tmp_path / "reading.py").write_text(BORN)
    losses = {}
    for name, steps in (("born", "4"), ("whole", "6")):
        asked = ["--step", f"reading:{name}", "--cluster", "host:2", "--stages", "2"]
        options = [*asked, "--microbatches", "2", "--compare", "2", "--out", name]
        assert run(["train", *options, "--steps", steps]) == 0
        if name == "born":  # a resumed run reads its state from the files, where the plan has it
            assert run(["train", "--resume", name, "--steps", "6", "--compare", "1"]) == 0
        with open(f"{name}/metrics.jsonl") as lines:
            losses[name] = [json.loads(line)["loss"] for line in lines]
    assert losses["born"] == losses["whole"] and len(losses["born"]) == 6
    assert "the same 2 steps on one device" in capsys.readouterr().out


ALONE = """
import jax, jax.numpy as jnp

def make():
    def step(w, _):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(w) @ w) ** 2))(w)
        return w - gradient, loss

    return step, jnp.eye(4), None
"""


def test_a_step_without_a_batch_trains(program, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    assert program("--step", "alone:make", "--microbatches", "1", "--steps", "2") == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_place_for_metrics_that_is_none_is_refused_at_the_start(program, capsys):
    assert program("--metrics", "nowhere/x.prom") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere/x.prom: cannot be written: No such file" in line


def test_a_signal_while_the_step_is_compiled_is_not_kept_for_later(program, monkeypatch, capsys):
    def interrupted(executable):
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(Executable, "prepare", interrupted)
    assert program("--steps", "3") == 143
    assert capsys.readouterr().err == "alpa: stopped by SIGTERM\n"
    assert not Path("run").exists()


NUMBERS = """
import jax, jax.numpy as jnp

def make():
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        other = {"complex": loss * 1j, "key": jax.random.key(0), "flag": loss > 0, "none": None}
        return w - gradient, {"loss": loss, "int": jnp.int4(3), "each": x[:, 0], **other}

    return step, jnp.eye(4, dtype=jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)

def silent():
    step, w, x = make()
    return (lambda w, x: step(w, x)[0]), w, x
"""


def test_all_that_a_step_returns_as_numbers_is_shown_and_compared(program, tmp_path, capsys):
    (tmp_path / "returned.py").write_text(NUMBERS)
    asked = ["--microbatches", "1", "--steps", "2", "--compare", "1"]
    assert program("--step", "returned:make", *asked) == 0
    with open("run/metrics.jsonl") as lines:
        row = json.loads(next(lines))
    assert row["int"] == 3 and 0 < row["loss"] < 1 and not {"complex", "key", "each"} & row.keys()
    assert "the same 1 steps on one device" in capsys.readouterr().out
    assert program("--step", "returned:silent", *asked) == 0
    shown = capsys.readouterr().out
    assert "step 2: " in shown and "one device" not in shown


def test_a_run_goes_on_with_a_step_that_was_changed_under_a_plan_of_its_own(
    program, tmp_path, monkeypatch, capsys
):
    (tmp_path / "changed.py").write_text(PROGRAM)
    assert program("--step", "changed:make", "--steps", "2") == 0
    edited = PROGRAM.replace("return w - gradient, loss", "return w - 0.5 * gradient, 2 * loss")
    (tmp_path / "changed.py").write_text(edited)
    monkeypatch.delitem(sys.modules, "changed")
    options = "--cluster host:2 --steps 3 --compare 1".split()
    kept = ["--plan", "run/plan.json"]
    assert run(["train", "--resume", "run", *options, *kept]) == 2
    assert "the plan was made for another program" in capsys.readouterr().err
    assert run(["train", "--resume", "run", *options]) == 0
    shown = capsys.readouterr().out
    assert "run/plan.json is of another program than changed:make is now" in shown
    with open("run/metrics.jsonl") as lines:
        assert len(list(lines)) == 3
    assert run(["train", "--resume", "run", "--steps", "4", "--compare", "0"]) == 0
    assert "another program" not in capsys.readouterr().out
