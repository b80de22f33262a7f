"""`alpa train --step module:function`: a user's program, planned, run and compared."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from attrs import frozen
from rich.console import Console

from alpa_interchange import load, save
from alpa_interchange.amounts import format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_meta.own_step import OwnStep, Runnable, after_step, load_step
from alpa_meta.report.cluster import cluster_table
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.plan_table import print_plan
from alpa_meta.report.progress import stages_progress
from alpa_meta.step.pure_call import OneDevice
from alpa_meta.trainer.host_devices import check_devices
from alpa_meta.trainer.planning import Parallelism, find_cluster, parallel_step


@frozen(kw_only=True)
class OwnRequest:
    """What the user asked `alpa train --step` for."""

    step: str
    cluster: str = "host:8"
    parallelism: Parallelism = Parallelism()
    plan: Path | None = None
    out: Path = Path("run")
    steps: int = 20
    comparison_steps: int = 20


def run_own_training(request: OwnRequest, console: Console) -> list[dict[str, Any]]:
    """Return the metrics of each step, having shown them and written the run's folder."""
    program = load_step(request.step)
    batches = _batches(program)
    batch = next(batches)
    cluster = find_cluster(request.cluster)
    note = check_devices(cluster)
    console.print(cluster_table(cluster))
    if note is not None:
        console.print(note)
    plan = None if request.plan is None else load(request.plan, ParallelPlan)
    with stages_progress(console) as progress:
        step = parallel_step(
            program.train_step, cluster, request.parallelism, plan=plan, progress=progress
        )
        state = program.arguments()[0]
        plan = step.plan_for(state, batch)
    print_plan(plan, console)
    folder = request.out
    folder.mkdir(parents=True, exist_ok=True)
    save(plan, folder / "plan.json")
    draw_plan(folder / "plan.png", plan)
    plain, other = OneDevice(program.train_step), program.arguments()[0]
    rows: list[dict[str, Any]] = []
    difference = 0.0
    with (folder / "metrics.jsonl").open("w") as lines:
        for number in range(request.steps):
            began = time.perf_counter()
            state, found = after_step(state, jax.block_until_ready(step(state, batch)))
            seconds = time.perf_counter() - began
            rows.append({"step": number + 1, **_scalars(found), "step_seconds": seconds})
            lines.write(json.dumps(rows[-1]) + "\n")
            console.print(_line(rows[-1]))
            if number < request.comparison_steps:
                other, expected = after_step(other, plain(other, batch))
                difference = max(difference, _difference(rows[-1], _scalars(expected)))
            if (batch := next(batches, None)) is None:
                console.print(f"the batches ended after {number + 1} steps")
                break
    compared = min(len(rows), request.comparison_steps)
    if compared:
        console.print(
            f"the same {compared} steps on one device: what the step returns differs by at most "
            f"{difference:.1e}"
        )
    console.print(f"wrote {folder}/: plan.json, plan.png, metrics.jsonl")
    return rows


def _batches(program: Runnable) -> Iterator[Any]:
    """Return the batches of a program: those of its iterator, or its one batch for ever."""
    yield program.arguments()[1]
    if isinstance(program, OwnStep) and program.later is not None:
        yield from program.later
        return
    while True:
        yield program.arguments()[1]


def _scalars(found: Any) -> dict[str, float]:
    """Return the numbers among what a step returned beside its state, by their path."""
    named = jax.tree_util.tree_flatten_with_path(found)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "loss": float(leaf)
        for path, leaf in named
        if np.ndim(leaf) == 0 and np.issubdtype(np.asarray(leaf).dtype, np.number)
    }


def _line(row: dict[str, Any]) -> str:
    values = [f"{name} {row[name]:.6g}" for name in row if name not in ("step", "step_seconds")]
    return f"step {row['step']}: {', '.join(values)} in {format_seconds(row['step_seconds'])}"


def _difference(row: dict[str, Any], expected: dict[str, float]) -> float:
    return max((abs(row[name] - value) for name, value in expected.items()), default=0.0)
