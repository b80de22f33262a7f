"""Every schedule, exported as CSV, against the validator of torch.distributed.pipelining.

    python benchmarks/torch_schedules.py [--python INTERPRETER]

torch checks that each stage runs every microbatch once, forward before backward and input before
weight, on one rank, adds the sends and receives, and executes the lists step by step: a list that
waits for itself is refused. INTERPRETER is a Python with torch, by default this one; without torch
the benchmark says so and ends. forward-only is left out: torch's lists are of training steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stage_dp import SCHEDULE_RULES, adaptive_warmups, order, torch_csv

SIZES = [(2, 1, 2), (2, 2, 4), (4, 1, 8), (4, 2, 8), (4, 3, 16), (8, 1, 32), (8, 2, 32), (8, 1, 5)]
"""(meshes, chunks per mesh where the schedule interleaves, microbatches)."""

IN_TORCH = """
import csv, json, sys
from torch.distributed.pipelining import schedules as torch_schedules
for line in sys.stdin:
    case = json.loads(line)
    with open(case["file"], newline="") as file:
        actions = {
            rank: [torch_schedules._Action.from_str(text) for text in row]
            for rank, row in enumerate(csv.reader(file))
        }
    try:
        ranks = torch_schedules._validate_schedule(
            actions, case["meshes"], case["stages"], case["microbatches"]
        )
        full = torch_schedules._add_send_recv(actions, ranks.__getitem__, case["stages"])
        run = torch_schedules._simulate_comms_compute(full, ranks.__getitem__, case["stages"])
        found = {"steps": max(map(len, run.values()))}
    except (AssertionError, RuntimeError, ValueError) as error:
        found = {"refused": str(error)[:500]}
    print(json.dumps({**case, **found}), flush=True)
"""


def cases(folder: Path) -> list[dict[str, object]]:
    """Return what torch is to check, with the CSV of each written into `folder`."""
    found: list[dict[str, object]] = []
    for name, rule in SCHEDULE_RULES.items():
        for meshes, chunks, microbatches in SIZES:
            stages = meshes * (chunks if rule.interleaves else 1)
            if not rule.has_backward or (chunks > 1) != rule.interleaves:
                continue
            warmups = None
            if name == "adaptive":
                warmups = adaptive_warmups([0.4] * (stages - 1), 1.0, microbatches)
            schedule = order(name, stages, microbatches, num_meshes=meshes, warmups=warmups)
            path = folder / f"{name}-{meshes}-{stages}-{microbatches}.csv"
            path.write_text(torch_csv(schedule))
            found.append(
                {
                    "schedule": name,
                    "meshes": meshes,
                    "stages": stages,
                    "microbatches": microbatches,
                    "file": str(path),
                }
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Check exported schedules with torch's validator.")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    python = parser.parse_args().python
    available = subprocess.run(
        [python, "-c", "import torch.distributed.pipelining"], capture_output=True, check=False
    )
    if available.returncode:
        print(
            f"{python} has no torch.distributed.pipelining, so no schedule was checked; install "
            "torch, or name a Python that has it with --python"
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        asked = "\n".join(json.dumps(case) for case in cases(Path(folder)))
        answer = subprocess.run(
            [python, "-c", IN_TORCH], input=asked, capture_output=True, text=True, check=False
        )
    if answer.returncode:
        print(answer.stderr, file=sys.stderr)
        return answer.returncode
    table = Table("schedule", "meshes", "stages", "microbatches", "torch")
    refused = 0
    for case in map(json.loads, answer.stdout.splitlines()):
        refused += "refused" in case
        verdict = case.get("refused") or f"accepted, {case['steps']} steps with transfers"
        counts = (str(case[key]) for key in ("meshes", "stages", "microbatches"))
        table.add_row(case["schedule"], *counts, verdict)
    Console(width=120).print(table)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
