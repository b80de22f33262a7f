"""Live bars: planning, and training with loss, tokens/s, step time and time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from alpa_interchange.amounts import format_duration, format_seconds
from alpa_meta.trainer.metrics import StepMetrics

RECENT_STEPS = 20  # the time left is judged by this many
PLAIN_LINES = 10  # so many lines of a training run where no bar can be drawn

STAGES = {  # what the planner calls its work, and what the user reads
    "trace": "trace the step",
    "cache": "take the plan of an earlier search",
    "plan": "plan every mesh",
    "stages": "plan the chosen stages",
    "compile": "compile",
    "start workers": "start workers on Ray, which compile",
    "explain": "price the alternatives",
    "replan": "plan again",
    "thresholds": "look where the plan changes",
}

Callback = Callable[[str, int, int], None]


@contextmanager
def stages_progress(console: Console) -> Iterator[Callback]:
    """Yield `progress(stage, done, total)`: one bar per stage, in order of appearance."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(STAGES.get(stage, stage), total=max(total, 1))
            progress.update(tasks[stage], completed=done if total else 1, total=max(total, 1))

        yield show


@contextmanager
def training_progress(
    console: Console, start: int, stop: int
) -> Iterator[Callable[[StepMetrics], None]]:
    """Yield `show(metrics)`: a live bar, or a line now and then where the output is no terminal."""
    recent: list[float] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        _Figures(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=stop, completed=start, metrics=None, left=None)

        def show(metrics: StepMetrics) -> None:
            recent.append(metrics.step_seconds)
            del recent[:-RECENT_STEPS]
            left = (stop - metrics.step) * sum(recent) / len(recent)
            progress.update(task, completed=metrics.step, metrics=metrics, left=left)
            every = max(1, (stop - start) // PLAIN_LINES)
            if not console.is_terminal and ((metrics.step - start) % every == 0):
                progress.print(f"step {metrics.step:5d}/{stop}  {_figures(metrics, left)}")

        yield show


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        metrics = task.fields.get("metrics")
        return Text("" if metrics is None else _figures(metrics, task.fields["left"]))


def _figures(metrics: StepMetrics, left: float) -> str:
    return (
        f"loss {metrics.loss:.3f}  {metrics.tokens_per_second:,.0f} tokens/s  "
        f"{format_seconds(metrics.step_seconds)}/step  {format_duration(left)} left"
    )
