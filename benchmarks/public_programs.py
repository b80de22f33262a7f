"""Runs training programs in the idiom of public libraries, whole, cut and as stages.

    uv pip install --python .venv/bin/python --group programs
    .venv/bin/python benchmarks/public_programs.py
    .venv/bin/python benchmarks/public_programs.py --program haiku --way "4 parts"
    .venv/bin/python benchmarks/public_programs.py --program rlax --way Ray --way "Ray, 2 stages"
    .venv/bin/python benchmarks/public_programs.py --summary --out programs.jsonl

Each program (tests/library_programs) takes a step on one device and then, on 8 host devices,
another in each way: whole, in 2 and in 4 microbatches, and in 2 microbatches on two stages. The
result is

    equal     that of one device, by the step's own sensitivity to rounding, and the compiled
              collectives are the planned ones
    refused   a `PlanError`, which is printed
    unproven  equal, but the collectives were XLA's to choose
    WRONG     another result or other collectives
    BROKEN    any other exception

The ways on Ray, run where they are named, are of a local cluster with a worker process for each
stage: two steps, of which the results and the state must have every bit of the same plan's in one
process.

With --out, findings are appended as they are made, and what the file already holds is not run
again. Exit status 0 if nothing is wrong or broken.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
).strip()
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import typer
from attrs import asdict, frozen
from equal_trees import assert_equal
from library_programs import PROGRAMS, build
from rich.console import Console
from rich.table import Table

import alpa_meta
from alpa_meta.audit.numerics import single_device_reference

WAYS = {
    "whole": {"num_stages": 1, "num_microbatches": 1},
    "2 parts": {"num_stages": 1, "num_microbatches": 2},
    "4 parts": {"num_stages": 1, "num_microbatches": 4},
    "2 stages": {"num_stages": 2, "num_microbatches": 2},
}
RAY_WAYS = {
    "Ray": WAYS["2 parts"],
    "Ray, 2 stages": WAYS["2 stages"],
}


@frozen(kw_only=True)
class Found:
    """What came of one program run in one way."""

    program: str
    way: str
    verdict: str
    note: str = ""
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the program ran as on one device, or was refused."""
        return self.verdict in ("equal", "refused", "unproven")


class Runner:
    """One program, its state one step old; the run on one device is made when it is needed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._step, state, self._batch = build(name)
        self._plain = jax.jit(self._step)
        self._state = self._plain(state, self._batch)[0]
        self._reference: Any = None

    def run(self, way: str) -> Found:
        """Return what comes of the program in one of `WAYS` or `RAY_WAYS`."""
        start = time.process_time()
        try:
            if way in RAY_WAYS:
                verdict, note = self._on_ray(RAY_WAYS[way])
            else:
                verdict, note = self._audited(WAYS[way])
        except alpa_meta.PlanError as error:
            verdict, note = "refused", str(error)
        except Exception as error:  # a finding, not the end of the run
            place = traceback.extract_tb(error.__traceback__)[-1]
            verdict = "BROKEN"
            note = f"{type(error).__name__} at {place.filename}:{place.lineno}: {error}"[:600]
        seconds = round(time.process_time() - start, 1)
        return Found(program=self.name, way=way, verdict=verdict, note=note, cpu_seconds=seconds)

    def _audited(self, options: dict[str, Any]) -> tuple[str, str]:
        step = alpa_meta.parallelize(self._step, cluster="host:8", **options)
        arguments = jax.tree.map(jnp.copy, (self._state, self._batch))
        step.lower(*arguments)
        if self._reference is None:
            arrays = (self._state, self._batch)
            self._reference = single_device_reference(self._plain, arrays, jax.random.key(0))
        audit = step.audit(*arguments, reference=self._reference)
        assert audit.numerics is not None
        note = audit.numerics.text()
        if not audit.ok:
            return "WRONG", f"{note}; {audit.summary()}"
        free = any(report.chosen_by_xla for report in audit.tasks.values())
        return "unproven" if free else "equal", note

    def _on_ray(self, options: dict[str, Any]) -> tuple[str, str]:
        import ray

        if not ray.is_initialized():  # one cluster for all programs
            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        near = alpa_meta.parallelize(self._step, cluster="host:8", **options)
        expected, batch = jax.tree.map(jnp.copy, (self._state, self._batch))
        near.lower(expected, batch)
        far = alpa_meta.parallelize(
            self._step, plan=near.plan, runtime=alpa_meta.RayOptions(stand_by=False)
        )
        state = jax.tree.map(jnp.copy, expected)
        try:
            for _ in range(2):
                expected, wanted = near(expected, batch)
                state, found = far(state, batch)
                assert_equal(far.gather(found), near.gather(wanted))
            assert_equal(far.gather(state), near.gather(expected))
        except AssertionError as error:
            return "WRONG", str(error)
        finally:
            far.close()
        return "equal", "every bit of two steps"


def _read(path: Path | None) -> list[Found]:
    """Return what an earlier run found; of a program run twice in one way, the later."""
    if path is None or not path.exists():
        return []
    found = [Found(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(one.program, one.way): one for one in found}.values())


def _print_table(found: list[Found], console: Console) -> None:
    """Print a row per program and a row of totals, then each different reason once."""
    by_place = {(one.program, one.way): one for one in found}
    names = dict.fromkeys(one.program for one in found)
    ways = [way for way in (*WAYS, *RAY_WAYS) if any(one.way == way for one in found)]
    table = Table("program", *ways)
    for name in names:
        cells = (by_place.get((name, way)) for way in ways)
        table.add_row(name, *("" if one is None else one.verdict for one in cells))
    table.add_section()
    totals = [Counter(one.verdict for one in found if one.way == way) for way in ways]
    shown = (", ".join(f"{count} {verdict}" for verdict, count in one.items()) for one in totals)
    table.add_row(f"{len(names)} programs", *shown)
    console.print(table)
    for name in names:
        notes: dict[str, list[str]] = {}
        for way in ways:
            one = by_place.get((name, way))
            if one is not None and one.verdict != "equal":
                notes.setdefault(f"{one.verdict}: {one.note}", []).append(way)
        for note, places in notes.items():
            console.print(f"{name}, {', '.join(places)}: {note}", markup=False)


def main(
    program: Annotated[
        list[str] | None, typer.Option(help="Part of a program's name; repeatable.")
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Of {'; '.join((*WAYS, *RAY_WAYS))}.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Findings so far, as JSON lines: read, and appended to.")
    ] = None,
    again: Annotated[
        bool, typer.Option(help="Run again what --out does not hold as equal.")
    ] = False,
    summary: Annotated[bool, typer.Option(help="Only say what --out holds.")] = False,
) -> None:
    """Run the programs and print a table; exit status 0 unless one is wrong or broken."""
    console = Console(highlight=False, soft_wrap=True)
    found = _read(out)
    left_out: list[str] = []
    if not summary:
        kept = [one for one in found if not again or one.verdict == "equal"]
        done = {(one.program, one.way) for one in kept}
        found = kept
        for name in PROGRAMS:
            left = [one for one in way or WAYS if (name, one) not in done]
            if not left or program and not any(part in name for part in program):
                continue
            try:
                runner = Runner(name)
            except ModuleNotFoundError as error:
                left_out.append(f"{name} (no {error.name})")
                continue
            for one in left:
                found.append(result := runner.run(one))
                line = f"{result.verdict:8} {name}, {one}, {result.cpu_seconds} s: {result.note}"
                console.print(line, markup=False)
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
            jax.clear_caches()
    _print_table(found, console)
    if left_out:
        console.print(
            f"NOT RUN, for want of a library: {', '.join(left_out)}; install them with "
            "`uv pip install --python .venv/bin/python --group programs`",
            markup=False,
        )
    raise typer.Exit(0 if all(one.ok for one in found) else 1)


if __name__ == "__main__":
    typer.run(main)
