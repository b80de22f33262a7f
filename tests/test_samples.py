"""What runs by default, with --full, and as the rest: together every case, none twice."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = "packages/stage-dp/tests/test_layer_choice.py"


STACKED = """
import pytest

@pytest.mark.parametrize("shape", "ab")
@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", "xy")
def test_it(kind, seed, shape): ...

@pytest.mark.sample("step", "options")
@pytest.mark.parametrize("options", "pq")
@pytest.mark.parametrize("step", range(5))
def test_pairs(step, options): ...

@pytest.mark.parametrize("case", ["kept", pytest.param("left out", marks=pytest.mark.bulk)])
def test_marked(case): ...
"""


def collected(*arguments):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
        + list(arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return {line for line in run.stdout.splitlines() if "::" in line}


def test_a_sample_and_the_cases_beyond_it_are_all_cases_of_every_test():
    sample, everything = collected(FILE), collected(FILE, "--full")
    rest = collected(FILE, "--full", "-m", "bulk")
    assert sample | rest == everything
    assert sample and rest and not sample & rest
    assert {name.partition("[")[0] for name in sample} == {
        name.partition("[")[0] for name in everything
    }


def test_a_sample_has_every_value_of_what_it_does_not_name_and_no_case_that_is_marked():
    cache = ROOT / ".cache"  # below conftest.py
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        file = Path(folder) / "test_stacked.py"
        file.write_text(STACKED)
        found = {line.partition("[")[2].rstrip("]") for line in collected(str(file))}
    sample = {f"{kind}-{seed}-{shape}" for kind in "xy" for seed in (0, 1) for shape in "ab"}
    pairs = {"0-p", "1-q", "2-p", "3-q", "4-p"}
    assert found == {*sample, *pairs, "kept"}
