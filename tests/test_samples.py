"""What runs by default, with --full, and as the rest: together every case, none twice."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = "packages/stage-dp/tests/test_layer_choice.py"


def collected(*arguments):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
        + [FILE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return {line for line in run.stdout.splitlines() if "::" in line}


def test_a_sample_and_the_cases_beyond_it_are_all_cases_of_every_test():
    sample, everything, rest = collected(), collected("--full"), collected("--full", "-m", "bulk")
    assert sample | rest == everything
    assert sample and rest and not sample & rest
    assert {name.partition("[")[0] for name in sample} == {
        name.partition("[")[0] for name in everything
    }
