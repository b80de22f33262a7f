"""How long the commands on a saved plan take, and how large its files are.

    .venv/bin/python benchmarks/saved_plan_commands.py plan.json
    .venv/bin/python benchmarks/saved_plan_commands.py              # plans GPT-1.3B on 4 V100 first
    .venv/bin/python benchmarks/saved_plan_commands.py plan.json --mutations 10000

Seconds are CPU seconds of whole processes, imports included, the least of three runs. With
`--mutations` that many changed copies of the plan (a value replaced, removed or put twice, a piece
of text cut or overwritten) are read and shown: each must be read or refused with a clear error.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alpa_interchange import ParallelPlan, load, menu_path
from alpa_interchange.document import DocumentError, from_json
from alpa_meta.errors import PlanError
from alpa_meta.report.plan_difference import plan_difference
from alpa_meta.report.plan_table import plan_summary

ALPA = (sys.executable, "-c", "from alpa_meta.cli import main; main()")
MODEL = ("--model", "gpt-1.3b", "--cluster", "p3.16xlarge:4")
RUNS = 3
VALUES: tuple[Any, ...]
VALUES = (None, True, -1, 0, 1, 10**9, 10**30, -1.0, 1e308, "", "x", [], [[]], {}, {"a": 1})


def cpu_seconds(*command: str) -> float:
    """Return the least CPU seconds of a command that must end well."""
    found = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*ALPA, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def commands(plan: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands that only read files."""
    yield ("show", plan)
    yield ("compare", plan, plan)
    if menu_path(plan).exists():
        yield ("explain", plan)
        memory = ("what-if", plan, "--memory", "14GiB")
        link = ("what-if", plan, "--link", "intra-host=100GB/s")
        for one in (memory, link):
            yield (*one, "--no-thresholds")
            yield one


def changed(document: Any, text: str, rng: random.Random) -> str:
    """Return the text of a document with one thing wrong, perhaps."""
    if rng.random() < 0.2:
        at, length = rng.randrange(len(text)), rng.randrange(1, 20)
        return text[:at] + rng.choice(["", "[", "}", '"', "9" * length]) + text[at + length :]
    value = copy.deepcopy(document)
    place: Any = value["value"]
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if not (isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.85):
            break
        place = place[key]
    kind = rng.random()
    if kind < 0.2:
        del place[key]
    elif kind < 0.3 and isinstance(place, list):
        place.append(copy.deepcopy(place[key]))
    else:
        place[key] = rng.choice(VALUES)
    return json.dumps(value)


def mutated(path: Path, count: int) -> dict[str, int]:
    """Return how many of `count` changed copies were read, and refused where; copies without the
    hash of what was saved, by which nearly all would be refused."""
    document, plan = json.loads(path.read_text()), load(path, ParallelPlan)
    document.pop("sha256", None)
    text = json.dumps(document)
    found = {"read": 0, "refused when read": 0, "refused when compared": 0}
    slowest = 0.0
    for seed in range(count):
        started = time.process_time()
        try:
            other = from_json(changed(document, text, random.Random(seed)), ParallelPlan)
            plan_summary(other), str(other), plan_difference(plan, other)
            found["read"] += 1
        except DocumentError:
            found["refused when read"] += 1
        except PlanError:
            found["refused when compared"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        slowest = max(slowest, time.process_time() - started)
    found["slowest, ms"] = round(1e3 * slowest)
    found["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("--mutations", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = asked.plan or Path(folder) / "plan.json"
        if asked.plan is None:
            subprocess.run([*ALPA, "plan", *MODEL, "--out", str(path)], check=True)
        console = Console()
        table = Table("", "")
        for file in (path, menu_path(path)):
            if file.exists():
                table.add_row(file.name, f"{file.stat().st_size / 1e6:.2f} MB")
        started = time.process_time()
        load(path, ParallelPlan)
        table.add_row("load(plan)", f"{time.process_time() - started:.2f} CPU s")
        for command in commands(str(path)):
            words = " ".join(word for word in command if word != str(path))
            table.add_row(f"alpa {words}", f"{cpu_seconds(*command):.2f} CPU s")
        console.print(table)
        if asked.mutations:
            console.print(mutated(path, asked.mutations))


if __name__ == "__main__":
    main()
