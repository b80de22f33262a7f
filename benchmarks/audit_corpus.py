"""Audits every corpus model under the planner's plans, presets and random plans, on 8 host devices.

    .venv/bin/python benchmarks/audit_corpus.py --random 20
    .venv/bin/python benchmarks/audit_corpus.py --model gpt --plan stages --random 0

One line per model and plan: every compiled collective must be accounted for by planned ones, none
may move more than planned, and one step's results must be those of one device. Exit status 0 only
if all hold. The plans:

    auto    the planner's, one stage, for the host devices
    fast    the planner's for eight H100s, half the memory it would like, run on the host devices
    stages  the planner's with two stages and four microbatches, parameters sharded as in zero3
            (refused where the step's result would change with microbatches)
    and the presets (dp, zero3, megatron, ...): the planner's under their constraints

Code is compiled without backend optimisation: collectives are fixed before it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0"
).strip()

import jax
import typer
from attrs import asdict, frozen
from rich.console import Console
from rich.progress import track

import alpa_meta
from alpa_meta.audit.planner_plans import arguments, reference_of
from alpa_meta.audit.random_plans import audit_random_plans, mesh_of_shape
from alpa_meta.corpus import NAMES, CorpusModel, build

FAST = "h100:8"


@frozen(kw_only=True)
class Found:
    """The audit of one model under one plan; `ratio` is compiled over planned link bytes."""

    model: str
    plan: str
    verdict: str
    num_planned: int = 0
    num_compiled: int = 0
    num_unplanned: int = 0
    planned_bytes: float = 0.0
    compiled_bytes: float = 0.0
    numerics: bool | None = None
    note: str = ""
    cpu_seconds: float = 0.0

    def line(self) -> str:
        """Return one line for people."""
        ratio = f"{self.compiled_bytes / self.planned_bytes:.4f}" if self.planned_bytes else "-"
        return (
            f"{self.verdict:8} {self.model:17} {self.plan:12} {self.num_compiled:4} compiled for "
            f"{self.num_planned:4} planned, bytes {ratio:7} {self.cpu_seconds:5.1f} s  {self.note}"
        )


def audit_plans(model: CorpusModel, plans: list[str], seeds: list[int]) -> Iterator[Found]:
    """Yield the audit of each plan, failures of any kind as findings."""
    reference: Any = None
    for plan in plans:
        start = time.process_time()
        try:
            step = _step(model, plan)
            step.lower(model.state, model.batch)
            reference = reference or reference_of(model)
            audit = step.audit(*arguments(model), reference=reference)
        except alpa_meta.PlanError as error:
            yield Found(model=model.name, plan=plan, verdict="refused", note=str(error)[:200])
            continue
        except Exception as error:  # a finding, not the end of the sweep
            note = f"{type(error).__name__}: {str(error)[:300]}"
            yield Found(model=model.name, plan=plan, verdict="ERROR", note=note)
            continue
        yield _found(model, plan, list(audit.tasks.values()), audit.numerics, audit.ok, start)
    mesh = mesh_of_shape((2, 4))
    start = time.process_time()
    for seed in seeds:
        try:
            (found,) = audit_random_plans(model, mesh, jax.devices()[:8], [seed])
        except Exception as error:
            note = f"{type(error).__name__}: {str(error)[:300]}"
            yield Found(model=model.name, plan=f"random {seed}", verdict="ERROR", note=note)
            continue
        one = found.audit
        yield _found(model, f"random {seed}", [one.collectives], one.numerics, one.ok, start)
        start = time.process_time()


def _step(model: CorpusModel, plan: str) -> Any:
    settings: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}
    cluster = FAST
    if plan == "auto":
        cluster = "host:8"
    elif plan == "stages":
        settings = {"num_stages": 2, "num_microbatches": 4, "preset": "zero3", "mesh_shape": (4,)}
    elif plan == "fast":
        free = alpa_meta.parallelize(model.train_step, cluster=FAST, **settings)
        needed = max(free.plan_for(model.state, model.batch).stage_plan.peak_bytes)
        settings["memory"] = needed / 2
    else:
        settings["preset"] = plan
    return alpa_meta.parallelize(model.train_step, cluster=cluster, **settings)


def _found(
    model: CorpusModel, plan: str, reports: list[Any], numerics: Any, ok: bool, start: float
) -> Found:
    notes = [f"{r.ok} {line.verdict}" for r in reports for line in r.lines if not line.ok][:3]
    if numerics is not None and not numerics.ok:
        notes.append(numerics.text())
    equal = all(report.equal for report in reports)
    return Found(
        model=model.name,
        plan=plan,
        verdict="FAIL" if not ok else "equal" if equal else "less",
        num_planned=sum(len(report.planned) for report in reports),
        num_compiled=sum(len(report.lines) for report in reports),
        num_unplanned=sum(not line.ok for report in reports for line in report.lines),
        planned_bytes=sum(report.planned_bytes for report in reports),
        compiled_bytes=sum(report.compiled_bytes for report in reports),
        numerics=None if numerics is None else numerics.ok,
        note="; ".join(notes),
        cpu_seconds=time.process_time() - start,
    )


def main(
    model: Annotated[list[str] | None, typer.Option(help="Corpus model; repeatable.")] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="auto, fast, stages or a preset; repeatable. none: random only."),
    ] = None,
    random: Annotated[int, typer.Option(min=0, help="Random plans per model.")] = 1,
    size: Annotated[str, typer.Option(help="tiny or small.")] = "tiny",
    out: Annotated[
        Path | None, typer.Option(help="Append findings to this file, as JSON lines.")
    ] = None,
) -> None:
    """Audit the corpus; exit status 0 only if every program is its plan."""
    plans = ["auto", "fast", "stages", "megatron"] if plan is None else plan
    plans = [] if plans == ["none"] else plans
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    for name in track(model or list(NAMES), console=Console(stderr=True), transient=True):
        for found in audit_plans(build(name, size), plans, list(range(random))):
            failed += found.verdict in ("FAIL", "ERROR")
            console.print(found.line(), markup=False)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        jax.clear_caches()
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
