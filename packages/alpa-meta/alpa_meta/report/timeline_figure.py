"""The picture of one step: every executed instruction of every mesh against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from alpa_interchange.amounts import counted, format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_interchange.schedule import Instruction
from alpa_meta.report.style import (
    CHARACTER,
    INK,
    PHASE_COLOURS,
    PHASE_LABELS,
    figure_file,
    plain,
)
from mesh_runtime import TraceEvent

ROW = 1.0
BOX = 0.62
WIDTH = 10.0  # inches
MAX_RUNS = 96  # of a mesh in one picture: a tenth of an inch each


def draw_last_step(path: Path, events: Sequence[TraceEvent], plan: ParallelPlan) -> None:
    """Write the instructions of the last step that a plan ran as a PNG picture at `path`."""
    names = [f"mesh {index}" for index in range(plan.stage_plan.num_meshes)]
    title = (
        f"one executed step: {plan.stage_plan.schedule}, {counted(plan.num_stages, 'stage')}, "
        f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')}"
    )
    draw_timeline(path, list(events), title=title, mesh_names=names)


def draw_timeline(
    path: Path, events: Sequence[TraceEvent], *, title: str, mesh_names: Sequence[str]
) -> None:
    """Write the executed instructions of one step as a PNG picture at `path`.

    One row per mesh; runs are boxes with the number of their microbatch (and token slice), sends
    and receives thin bars below them. Times are counted from the first instruction. Of a step with
    many runs the beginning and the end are drawn.
    """
    if not events:
        raise ValueError("draw_timeline needs the events of at least one instruction, got none")
    with figure_file(path, WIDTH, schedule_height(len(mesh_names))) as figure:
        plot_schedule(figure, events, mesh_names, title=title)


def schedule_height(num_meshes: int) -> float:
    """Return the inches that a schedule of so many meshes needs."""
    return 1.4 + (0.62 if num_meshes <= 4 else 0.45) * num_meshes


def plot_schedule(
    figure: Figure | SubFigure,
    events: Sequence[TraceEvent],
    mesh_names: Sequence[str],
    *,
    title: str,
) -> None:
    """Draw a schedule into a figure `WIDTH` inches wide, with a legend."""
    windows = _windows(events)
    lengths = [stop - start for start, stop in windows]
    panels = figure.subplots(1, len(windows), squeeze=False, width_ratios=lengths)[0]
    shown: set[str] = set()
    for axes, window in zip(panels, windows, strict=True):
        inches = 0.9 * WIDTH * (window[1] - window[0]) / sum(lengths)
        shown |= _plot_events(plain(axes), events, window, inches)
        axes.set_yticks([])
    panels[0].set_yticks([mesh * ROW for mesh in range(len(mesh_names))], list(mesh_names))
    if len(windows) > 1:
        whole = format_seconds(windows[-1][1] - windows[0][0])
        title += f": the first {format_seconds(lengths[0])} of {whole}"
        end = f"the last {format_seconds(lengths[-1])}"
        panels[-1].set_title(end, color=INK, fontsize=9, loc="left")
        panels[-1].spines["left"].set_visible(False)
    panels[0].set_title(title, color=INK, fontsize=9, loc="left")
    figure.legend(
        handles=_phase_patches(shown),
        loc="outside lower center",
        ncols=len(PHASE_COLOURS),
        frameon=False,
        fontsize=8,
    )


def _windows(events: Sequence[TraceEvent]) -> list[tuple[float, float]]:
    """Return the times to draw: all, or the beginning and the end where a mesh has so many runs
    that they would be no wider than lines."""
    first, last = min(event.start for event in events), max(event.stop for event in events)
    runs: dict[int, list[TraceEvent]] = {}
    for event in events:
        if event.instruction.kind == "run":
            runs.setdefault(event.mesh, []).append(event)
    ordered = [sorted(own, key=lambda event: event.stop) for own in runs.values()]
    busiest = max(ordered, key=lambda own: len(own), default=[])
    if len(busiest) <= MAX_RUNS:
        return [(first, last)]
    # The pipeline fills while as many runs go by as there are meshes, and is to be seen filled.
    count = min(MAX_RUNS // 2 + len(runs), len(busiest) // 2)
    return [(first, busiest[count].stop), (busiest[-count // 2].start, last)]


def _plot_events(
    axes: Axes, events: Sequence[TraceEvent], window: tuple[float, float], inches: float
) -> set[str]:
    """Return the kinds of the instructions drawn into `axes`, one row per mesh, of the times in
    `window`, which are so many inches wide."""
    origin = min(event.start for event in events)
    first, last = window
    length = max(event.stop for event in events) - origin
    unit, unit_name = (
        (1.0, "s") if length >= 10 else (1e-3, "ms") if length >= 1e-3 else (1e-6, "µs")
    )
    sliced = any(event.instruction.slice_index for event in events)
    boxes: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}
    for event in events:
        kind = _kind(event.instruction)
        start, stop = max(event.start, first), min(event.stop, last)
        if kind is None or stop <= start:
            continue
        is_run = event.instruction.kind == "run"
        left, right = (start - origin) / unit, (stop - origin) / unit
        row = event.mesh * ROW
        top, bottom = (row - BOX / 2, row + BOX / 2) if is_run else (row + 0.34, row + 0.44)
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        boxes.setdefault((kind, is_run), []).append(corners)
        if is_run and event.instruction.microbatch is not None:
            number = _number(event.instruction, sliced)
            if inches * (stop - start) / (last - first) > CHARACTER * (len(number) + 0.6):
                axes.text(
                    (left + right) / 2, row, number, ha="center", va="center", fontsize=7, color=INK
                )
    for (kind, is_run), corners_of in boxes.items():  # thousands of patches would take minutes
        axes.add_collection(
            PolyCollection(
                corners_of,
                facecolors=PHASE_COLOURS[kind],
                edgecolors="white" if is_run else PHASE_COLOURS[kind],
                linewidths=0.4,
            )
        )
    axes.set_ylim((max(event.mesh for event in events) + 1) * ROW - 0.35, -0.55)
    axes.set_xlim((first - origin) / unit, (last - origin) / unit)
    axes.set_xlabel(f"time in the step, {unit_name}", color=INK, fontsize=9)
    return {kind for kind, _ in boxes}


def _number(instruction: Instruction, sliced: bool) -> str:
    """Return the number that a box carries: of its microbatch, and of its token slice."""
    token_slice = f".{instruction.slice_index}" if sliced else ""
    return f"{instruction.microbatch}{token_slice}"


def _phase_patches(shown: set[str]) -> list[Patch]:
    """Return the entries of a legend for the kinds of instructions in `shown`."""
    labels = dict(PHASE_LABELS)
    if shown == {"forward + backward"}:
        labels["forward + backward"] = "whole step"  # the update is part of the one program
    return [
        Patch(color=colour, label=labels.get(kind, kind))
        for kind, colour in PHASE_COLOURS.items()
        if kind in shown
    ]


def _kind(instruction: Instruction) -> str | None:
    """Return the colour key of an instruction, None for those that take no time."""
    if instruction.kind == "run":
        if instruction.task.startswith("train"):  # one task does both where there is no pipeline
            return "forward + backward"
        return instruction.phase if instruction.phase in PHASE_COLOURS else "forward"
    return instruction.kind if instruction.kind in ("send", "receive") else None
