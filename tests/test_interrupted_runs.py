"""Runs that signals stop between two steps: nothing is lost, and what follows is the same run."""

import json
import os
import random
import signal
import threading
import time

import jax
import numpy as np
import pytest

import alpa_meta as alpa
from alpa_meta.cli import run

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax

ADAM = optax.adam(1e-2)

def step(state, x):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - x) ** 2)
    noise, key = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    updates, moments = ADAM.update(gradients, state["moments"])
    weights = optax.apply_updates(state["weights"], updates)
    drawn = jax.random.uniform(noise)
    return {"weights": weights, "moments": moments, "key": key}, {"loss": loss, "drawn": drawn}

def make():
    weights = {"up": jnp.ones((64, 256)) / 99, "down": jnp.ones((256, 64)) / 99}
    state = {"weights": weights, "moments": ADAM.init(weights), "key": jax.random.key(5)}
    batches = (np.random.default_rng(k).normal(size=(8, 64)).astype(np.float32) for k in range(999))
    return step, state, batches
"""
STEPS = 60
ARGUMENTS = ["--compare", "0", "--checkpoint-every", "7", "--stages", "1"]


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{name: row[name] for name in ("step", "loss", "drawn")} for row in found]


def stopping(folder, number, lines, delay):
    """Start a thread that sends this process a signal some time after so many steps are done."""

    def send():
        path = folder / "metrics.jsonl"
        while not path.exists() or path.read_text().count("\n") < lines:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_runs_stopped_at_random_moments_end_as_the_undisturbed_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "interrupted_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    program = ["train", "--step", "interrupted_program:make", *ARGUMENTS]
    assert run([*program, "--steps", str(STEPS), "--out", str(whole)]) == 0
    draw = random.Random(3)
    arguments = [*program, "--out", str(folder)]
    for k, number in enumerate([signal.SIGTERM, signal.SIGINT] * 3):
        thread = stopping(folder, number, 9 * k + draw.randrange(1, 5), draw.random() / 50)
        status = run([*arguments, "--steps", str(STEPS)])
        thread.join()
        assert status == 128 + number
        done = rows(folder)
        assert done == rows(whole)[: len(done)]
        assert alpa.read_checkpoint(folder / "checkpoint").step == len(done)
        assert f"stopped by {number.name} after step {len(done)}" in capsys.readouterr().out
        arguments = ["train", "--resume", str(folder), *ARGUMENTS]
    assert run([*arguments, "--steps", str(STEPS)]) == 0
    assert rows(folder) == rows(whole)
    ends = [alpa.restore(path / "checkpoint") for path in (folder, whole)]
    keys = [end.pop("key") for end in ends]
    assert keys[0] == keys[1]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_damaged_newest_checkpoint_costs_its_steps_only(tmp_path, monkeypatch, capsys):
    (tmp_path / "damaged_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    program = ["train", "--step", "damaged_program:make", *ARGUMENTS, "--out", str(folder)]
    assert run([*program, "--steps", "10"]) == 0
    before = rows(folder)
    newest = sorted((folder / "checkpoint").iterdir())[-1]
    (newest / "manifest.ocdbt").write_bytes(b"")
    (folder / "checkpoint" / "step-bad").mkdir()
    capsys.readouterr()
    assert run(["train", "--resume", str(folder), *ARGUMENTS, "--steps", "12"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is damaged" in said and "going back to step-00000007" in said
    assert rows(folder)[:10] == before and len(rows(folder)) == 12
    assert alpa.read_checkpoint(folder / "checkpoint").step == 12


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place nobody can write to")
def test_a_place_that_cannot_be_written_is_refused_before_planning(tmp_path, capsys):
    assert run(["train", "--out", "/proc/self/run"]) == 2
    assert "/proc/self/run: cannot be written" in capsys.readouterr().err
