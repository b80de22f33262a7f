"""Audits every corpus model under the planner's plans, presets and random plans, on 8 host devices.

    .venv/bin/python benchmarks/audit_corpus.py --random 20 --out audit.jsonl
    .venv/bin/python benchmarks/audit_corpus.py --model gpt --plan stages --random 0
    .venv/bin/python benchmarks/audit_corpus.py --summary --out audit.jsonl

One line per model and plan: every compiled collective must be accounted for by planned ones, none
may move more than planned, and one step's results must be those of one device. Exit status 0 only
if all hold. The plans:

    auto    the planner's, one stage, for the host devices
    fast    the planner's for eight H100s, half the memory it would like, run on the host devices
    stages  the planner's with two stages and four microbatches, parameters sharded as in zero3
            (refused where the step's result would change with microbatches)
    and the presets (dp, zero3, megatron, ...): the planner's under their constraints
    random  a strategy drawn for every operator, on each of --mesh in turn: 2x2 three times out of
            four, else 2x4
    drawn   --drawn of them: a feasible plan of the whole planner, stages and microbatches drawn too

With --out, findings are appended as they are made, and what the file already holds is not audited
again: a sweep that was broken off goes on. Code is compiled without backend optimisation:
collectives are fixed before it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
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
from alpa_meta.audit.planner_plans import reference_of
from alpa_meta.audit.random_plans import mesh_of_shape, random_audits
from alpa_meta.corpus import NAMES, CorpusModel, build

FAST = "h100:8"
MESHES = ("2x2", "2x2", "2x2", "2x4")


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
    worst_ulps: float = 0.0
    allowed_ulps: float = 0.0
    note: str = ""
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the program is its plan, or the plan cannot be (which is said)."""
        return self.verdict not in ("FAIL", "ERROR")

    def line(self) -> str:
        """Return one line for people."""
        ratio = f"{self.compiled_bytes / self.planned_bytes:.4f}" if self.planned_bytes else "-"
        return (
            f"{self.verdict:8} {self.model:17} {self.plan:13} {self.num_compiled:4} compiled for "
            f"{self.num_planned:4} planned, bytes {ratio:7} {self.cpu_seconds:5.1f} s  {self.note}"
        )


def audit_planned(model: CorpusModel, plans: list[str]) -> Iterator[Found]:
    """Yield the audit of each plan of the planner's, failures of any kind as findings."""
    reference: Any = None
    for plan in plans:
        start = time.process_time()
        try:
            step = _step(model, plan)
            step.lower(model.state, model.batch)
            reference = reference or reference_of(model)
            audit = step.audit(*model.arguments(), reference=reference)
        except alpa_meta.PlanError as error:
            yield Found(model=model.name, plan=plan, verdict="refused", note=str(error)[:200])
            continue
        except Exception as error:  # a finding, not the end of the sweep
            yield _broken(model, plan, error)
            continue
        yield _found(model, plan, list(audit.tasks.values()), audit.numerics, audit.ok, start)
        jax.clear_caches()


def audit_random(model: CorpusModel, plans: dict[str, tuple[int, str]]) -> Iterator[Found]:
    """Yield the audit of each random plan: its name, seed and mesh."""
    prepared = random_audits(model) if plans else None
    for plan, (seed, mesh) in plans.items():
        start = time.process_time()
        try:
            assert prepared is not None
            shape = [int(size) for size in mesh.split("x")]
            one = prepared.audit(mesh_of_shape(shape), jax.devices(), seed).audit
        except Exception as error:
            yield _broken(model, plan, error)
            continue
        yield _found(model, plan, [one.collectives], one.numerics, one.ok, start)


def _step(model: CorpusModel, plan: str) -> Any:
    settings: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1}
    cluster = FAST
    if plan == "auto":
        cluster = "host:8"
    elif plan == "stages":
        settings = {"num_stages": 2, "num_microbatches": 4, "preset": "zero3", "mesh_shape": (4,)}
    elif plan == "fast":
        free = alpa_meta.parallelize(model.train_step, cluster=FAST, cache=False, **settings)
        needed = max(free.plan_for(model.state, model.batch).device_bytes)
        settings["memory"] = needed / 2
    elif plan.startswith("drawn "):
        step = alpa_meta.parallelize(model.train_step, cluster="host:8", num_layers=4)
        chosen = step.random_plan(model.state, model.batch, seed=int(plan.split()[1]))
        settings, cluster = {"plan": chosen, "num_layers": 4}, "host:8"
    else:
        settings["preset"] = plan
    return alpa_meta.parallelize(model.train_step, cluster=cluster, cache=False, **settings)


def _broken(model: CorpusModel, plan: str, error: Exception) -> Found:
    note = f"{type(error).__name__}: {str(error)[:300]}"
    return Found(model=model.name, plan=plan, verdict="ERROR", note=note)


def _found(
    model: CorpusModel, plan: str, reports: list[Any], numerics: Any, ok: bool, start: float
) -> Found:
    wrong = [line for report in reports for line in report.lines if not line.ok]
    notes = [
        f"{line.compiled.kind} over {line.axes}, {line.compiled.bytes} bytes: {line.verdict}"
        for line in wrong[:3]
    ]
    if numerics is not None and not numerics.ok:
        notes.append(numerics.text())
    equal = all(report.equal for report in reports)
    return Found(
        model=model.name,
        plan=plan,
        verdict="FAIL" if not ok else "equal" if equal else "less",
        num_planned=sum(len(report.planned) for report in reports),
        num_compiled=sum(len(report.lines) for report in reports),
        num_unplanned=len(wrong),
        planned_bytes=sum(report.planned_bytes for report in reports),
        compiled_bytes=sum(report.compiled_bytes for report in reports),
        numerics=None if numerics is None else numerics.ok,
        worst_ulps=0.0 if numerics is None else numerics.worst.ulps,
        allowed_ulps=0.0 if numerics is None else numerics.worst.allowed_ulps,
        note="; ".join(notes),
        cpu_seconds=time.process_time() - start,
    )


def _read(path: Path | None) -> list[Found]:
    """Return what an earlier sweep found; of a model and plan found twice, the later."""
    if path is None or not path.exists():
        return []
    found = [Found(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(one.model, one.plan): one for one in found}.values())


def _summarise(found: list[Found], console: Console) -> None:
    """Print per model how many plans of each sort were audited, and what came of them."""
    for model in NAMES:
        mine = [one for one in found if one.model == model]
        parts = []
        for sort, chosen in (
            ("planner's", [one for one in mine if one.plan.split()[0] not in ("random", "drawn")]),
            ("random", [one for one in mine if one.plan.startswith("random")]),
            ("drawn", [one for one in mine if one.plan.startswith("drawn")]),
        ):
            verdicts = Counter(one.verdict for one in chosen)
            ratios = [one.compiled_bytes / one.planned_bytes for one in chosen if one.planned_bytes]
            span = f", bytes {min(ratios):.3f}-{max(ratios):.3f}" if ratios else ""
            counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            parts.append(f"{len(chosen)} {sort} ({counts}{span})" if chosen else f"0 {sort}")
        console.print(f"{model:17} {'; '.join(parts)}", markup=False)
    failed = sum(not one.ok for one in found)
    compiled, planned = sum(o.num_compiled for o in found), sum(o.num_planned for o in found)
    console.print(
        f"{len(found)} programs, {compiled} compiled collectives for {planned} planned, "
        f"{sum(one.num_unplanned for one in found)} unplanned, {failed} failures, "
        f"{sum(one.cpu_seconds for one in found):.0f} CPU seconds"
    )


def main(
    model: Annotated[list[str] | None, typer.Option(help="Corpus model; repeatable.")] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="auto, fast, stages or a preset; repeatable. none: none of these."),
    ] = None,
    random: Annotated[int, typer.Option(min=0, help="Random plans per model.")] = 1,
    drawn: Annotated[int, typer.Option(min=0, help="Plans drawn by the planner per model.")] = 0,
    mesh: Annotated[
        list[str] | None, typer.Option(help="Meshes of the random plans, in turn; repeatable.")
    ] = None,
    size: Annotated[str, typer.Option(help="tiny or small.")] = "tiny",
    out: Annotated[
        Path | None, typer.Option(help="Findings so far, as JSON lines: read, and appended to.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Audit failures of --out again.")] = False,
    summary: Annotated[bool, typer.Option(help="Only say what --out holds.")] = False,
) -> None:
    """Audit the corpus; exit status 0 only if every program is its plan."""
    console = Console(highlight=False, soft_wrap=True)
    earlier = _read(out)
    if summary:
        _summarise(earlier, console)
        raise typer.Exit(0 if all(one.ok for one in earlier) else 1)
    plans = ["auto", "fast", "stages", "megatron"] if plan is None else plan
    plans = [one for one in plans if one != "none"] + [f"drawn {seed}" for seed in range(drawn)]
    meshes = tuple(mesh or MESHES)
    drawn_for = {seed: meshes[seed % len(meshes)] for seed in range(random)}
    draws = {f"random {seed} {shape}": (seed, shape) for seed, shape in drawn_for.items()}
    failed = 0
    for name in track(model or list(NAMES), console=Console(stderr=True), transient=True):
        done = {one.plan for one in earlier if one.model == name and (one.ok or not again)}
        failed += sum(not one.ok for one in earlier if one.model == name and one.plan in done)
        left = {key: draw for key, draw in draws.items() if key not in done}
        built = build(name, size)
        for found in chain(
            audit_planned(built, [one for one in plans if one not in done]),
            audit_random(built, left),
        ):
            failed += not found.ok
            console.print(found.line(), markup=False)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        jax.clear_caches()
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
