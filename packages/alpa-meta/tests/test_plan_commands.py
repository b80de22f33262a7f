"""The commands about saved plans, run as a user does."""

import json

import pytest
from layered_plan import lowered

from alpa_interchange import save_plan
from alpa_meta.cli import run


@pytest.fixture(autouse=True)
def plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two, four = lowered(num_stages=2), lowered(num_stages=4, num_microbatches=16)
    save_plan(two.plan, "two.json", two.menu)
    save_plan(four.plan, "four.json", four.menu)


def test_a_plan_is_explained_as_a_table_a_picture_and_json(capsys, tmp_path):
    assert run(["explain", "two.json", "--picture", "why.png"]) == 0
    text = capsys.readouterr().out
    assert "boundary" in text and "in the prices of its menu" in text
    assert (tmp_path / "why.png").read_bytes()[1:4] == b"PNG"
    assert run(["explain", "two.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"menu_seconds", "alternatives"} <= set(found)
    assert {one["decision"] for one in found["alternatives"]} >= {"stages", "boundary"}


def test_two_plans_are_compared(capsys):
    assert run(["compare", "two.json", "four.json"]) == 0
    text = capsys.readouterr().out
    assert "bubble" in text and "decisions that differ" in text
    assert run(["compare", "two.json", "four.json", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["costs"]) == 2


def test_a_plan_is_changed_for_another_cluster(capsys):
    arguments = ["what-if", "two.json", "--hosts", "1", "--link", "intra-host=100GB/s"]
    assert run([*arguments, "--memory", "8GiB", "--no-thresholds"]) == 0
    text = capsys.readouterr().out
    assert "state that must move" in text and "plan it in full with num_stages=" in text
    assert run(["what-if", "two.json", "--memory", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["thresholds"][0]["what"] == "memory" and not found["changed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "absent.json"], "absent.json: cannot be read"),
        (["explain", "two.json", "--menu", "four.json"], "a 'KeptMenu' is needed"),
        (["what-if", "two.json", "--hosts", "none"], "--hosts must be a number"),
        (["what-if", "two.json", "--link", "100Gb/s"], "must look like inter-host=100Gb/s"),
        (["what-if", "two.json", "--link", "inter-host=fast"], "must look like 100Gb/s (bits)"),
        (["what-if", "two.json", "--memory", "lots"], "--memory: an amount of memory"),
        (["what-if", "two.json", "--memory", "1MiB"], "plan anew"),
        (["compare", "two.json"], "needs two of them"),
        (["compare", "gpt", "--json"], "--json is for two saved plans"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence(arguments, message, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("alpa: ") and message in error and "Traceback" not in error


def test_a_plan_without_a_menu_is_not_explained(capsys, tmp_path):
    (tmp_path / "two.menu.json").unlink()
    assert run(["explain", "two.json"]) == 2
    assert "there is no menu of two.json" in capsys.readouterr().err
