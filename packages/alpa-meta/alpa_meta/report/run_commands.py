"""`alpa trace` and `alpa top`: what a run did in its last step, and what it is doing."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from alpa_interchange import load
from alpa_interchange.amounts import format_bytes, format_duration, format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_meta.errors import PlanError
from alpa_meta.report.chrome_trace import read_trace, write_trace
from alpa_meta.report.predicted_events import predicted_events
from alpa_meta.report.prometheus import Sample, read_samples
from alpa_meta.stopping import stopped_of

REFRESH_SECONDS = 1.0
NARROW = 80  # columns, below which the times of the parts would be cut off
Run = Annotated[Path, typer.Argument(help="The folder of a run, --out of `alpa train`.")]


def trace(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="RUN/trace.json")
    ] = None,
) -> None:
    """Write a run's last step for Perfetto or Chrome.

    The lanes that were predicted stand above those that were executed, in ui.perfetto.dev or
    chrome://tracing.
    """
    executed = run / "timeline.json"
    if not executed.is_file():
        raise PlanError(
            f"{executed}: is not there; it is written when a run has done all its steps, not when "
            "it is stopped: give the folder of one that has, or go on with alpa train --resume"
        )
    try:
        events = read_trace(executed)
    except ValueError as error:
        raise PlanError(str(error)) from None
    plan = load(run / "plan.json", ParallelPlan)
    path = out or run / "trace.json"
    try:
        write_trace(path, {"predicted": predicted_events(plan), "executed": events})
    except OSError as error:
        raise PlanError(
            f"{path}: cannot be written: {error.strerror}; choose another file with --out"
        ) from None
    typer.echo(f"wrote {path}; open it in ui.perfetto.dev")


def top(
    run: Run,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once instead of watching.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(
            help="The run's newest step, --metrics of `alpa train`.",
            show_default="RUN/metrics.prom",
        ),
    ] = None,
) -> None:
    """Watch a run: what its steps' time goes to, slow meshes.

    Of the newest step and of each mesh, with the memory as planned.
    """
    from alpa_meta.commands import console

    path, terminal = metrics or run / "metrics.prom", console()
    try:
        if not path.is_file():
            raise PlanError(f"{path}: is not there; it appears with the first step of a run")
        if once or not terminal.is_terminal:
            terminal.print(_newest(path, terminal.width))
            return
        with Live(console=terminal, auto_refresh=False) as live:
            while True:
                live.update(_newest(path, terminal.width), refresh=True)
                time.sleep(REFRESH_SECONDS)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except KeyboardInterrupt as interrupt:  # Ctrl-C is how one leaves it
        if stopped_of(interrupt).signal is not signal.SIGINT:
            raise


def _newest(path: Path, width: int) -> RenderableType:
    """Return the picture of the newest step in a file; of a run that has been moved aside since, a
    word of it."""
    try:
        samples, age = read_samples(path), time.time() - path.stat().st_mtime
        return view(samples, age, narrow=width < NARROW)
    except FileNotFoundError:
        return Text(f"{path} has gone; waiting for the first step of another run")
    except (ValueError, LookupError) as error:
        message = str(error) if isinstance(error, ValueError) else f"{path}: lacks {error}"
        raise PlanError(f"{message}; it is not what a run writes") from None


def view(samples: Sequence[Sample], age: float, narrow: bool = False) -> Group:
    """Return the picture of the newest step, `age` seconds old; `narrow` fits 40 columns."""
    one = {sample.name: sample.value for sample in samples if not sample.labels}
    values = {s.labels["name"]: s.value for s in samples if s.name == "alpa_value"}
    seconds = one["alpa_step_seconds"]
    predicted = one.get("alpa_predicted_step_seconds", math.nan)
    head = Text(
        f"step {one['alpa_step']:.0f}   {format_seconds(seconds)}/step "
        f"(planned {format_seconds(predicted)})   "
        + "   ".join(f"{name} {value:,.6g}" for name, value in values.items())
    )
    if one.get("alpa_recoveries_total"):
        head.append(f"   workers replaced {one['alpa_recoveries_total']:.0f} times")
    if one.get("alpa_ended"):
        head.append(f"   ended {format_duration(max(age, 0.0))} ago", style="bold")
    elif age > max(10.0, 5 * seconds):
        head.append(f"   no step for {format_duration(age)}", style="bold red")
    return Group(head, _meshes(samples, narrow), *_slow(samples), _memory(samples))


def _meshes(samples: Sequence[Sample], narrow: bool) -> Table:
    parts: dict[str, dict[str, float]] = {}
    for sample in samples:
        if sample.name == "alpa_mesh_seconds":
            parts.setdefault(sample.labels["mesh"], {})[sample.labels["part"]] = sample.value
    names = list(dict.fromkeys(name for found in parts.values() for name in found))
    title = "what the last step was spent on"
    table = Table("mesh", *names, title=title, title_justify="left")
    if narrow:
        table.box, table.pad_edge = None, False
    for mesh, found in parts.items():
        whole = sum(found.values()) or math.nan
        shares = [f"{found[name] / whole:.0%}" for name in names]
        if not narrow:
            times = [format_seconds(found[name]) for name in names]
            shares = [f"{time} ({share})" for time, share in zip(times, shares, strict=True)]
        table.add_row(mesh, *shares)
    return table


def _slow(samples: Sequence[Sample]) -> list[Text]:
    return [
        Text(f"mesh {s.labels['mesh']} is {s.value:.1f} x slower than before", style="bold red")
        for s in samples
        if s.name == "alpa_mesh_slow"
    ]


def _memory(samples: Sequence[Sample]) -> Text:
    found = [s for s in samples if s.name == "alpa_planned_bytes"]
    stages = ", ".join(f"stage {s.labels['stage']} {format_bytes(s.value)}" for s in found)
    return Text(f"memory per device, as planned: {stages}" if found else "")
