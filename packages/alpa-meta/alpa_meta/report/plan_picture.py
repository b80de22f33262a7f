"""The picture of a plan as the commands draw it: with what its menu says of other settings."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from alpa_interchange import KeptMenu
from alpa_interchange.plan import ParallelPlan
from alpa_meta.planning.explanation import explain
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.progress import stages_progress


def write_picture(path: Path, plan: ParallelPlan, menu: KeptMenu | None, console: Console) -> None:
    """Write the picture of `plan` at `path`, with the next best settings where there is a menu."""
    found = None
    if menu is not None:
        with stages_progress(console) as progress:
            found = explain(plan, menu, progress, pipeline_only=True)
    draw_plan(path, plan, found)
    console.print(f"wrote {path}")
