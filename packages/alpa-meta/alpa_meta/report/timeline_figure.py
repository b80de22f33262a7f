"""The picture of one step: every executed instruction of every mesh against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from alpa_interchange.amounts import counted
from alpa_interchange.plan import ParallelPlan
from alpa_interchange.schedule import Instruction
from alpa_meta.report.style import INK, PHASE_COLOURS, figure_file, plain
from mesh_runtime import TraceEvent

ROW = 1.0
BOX = 0.62
LABEL_SHARE = 0.012  # a box narrower than this share of the step carries no number


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
    and receives thin bars below them. Times are counted from the first instruction.
    """
    if not events:
        raise ValueError("draw_timeline needs the events of at least one instruction, got none")
    with figure_file(path, 10.0, 1.5 + 0.62 * len(mesh_names)) as figure:
        axes = plain(figure.subplots())
        shown = plot_events(axes, events, mesh_names)
        axes.set_title(title, color=INK, fontsize=10, loc="left")
        figure.legend(
            handles=phase_patches(shown),
            loc="outside lower center",
            ncols=len(PHASE_COLOURS),
            frameon=False,
            fontsize=8,
        )


def plot_events(axes: Axes, events: Sequence[TraceEvent], mesh_names: Sequence[str]) -> set[str]:
    """Return the kinds of the instructions drawn into `axes`, one row per mesh."""
    origin = min(event.start for event in events)
    length = max(event.stop for event in events) - origin
    unit, unit_name = (
        (1.0, "s") if length >= 10 else (1e-3, "ms") if length >= 1e-3 else (1e-6, "µs")
    )
    shown = set()
    sliced = any(event.instruction.slice_index for event in events)
    for event in events:
        kind = _kind(event.instruction)
        if kind is None or event.stop == event.start:
            continue
        shown.add(kind)
        left, width = (event.start - origin) / unit, (event.stop - event.start) / unit
        is_run = event.instruction.kind == "run"
        top = event.mesh * ROW
        axes.broken_barh(
            [(left, width)],
            (top - BOX / 2, BOX) if is_run else (top + BOX / 2 + 0.03, 0.1),
            facecolors=PHASE_COLOURS[kind],
            edgecolors="white" if is_run else "none",
            linewidth=0.4,
        )
        microbatch = event.instruction.microbatch
        if is_run and microbatch is not None and width * unit >= LABEL_SHARE * length:
            axes.text(
                left + width / 2,
                top,
                _number(event.instruction, sliced),
                ha="center",
                va="center",
                fontsize=7,
                color=INK,
            )
    axes.set_yticks([mesh * ROW for mesh in range(len(mesh_names))], list(mesh_names))
    axes.set_ylim(len(mesh_names) * ROW - 0.35, -0.55)
    axes.set_xlim(0, length / unit)
    axes.set_xlabel(f"time in the step, {unit_name}", color=INK, fontsize=9)
    return shown


def _number(instruction: Instruction, sliced: bool) -> str:
    """Return the number that a box carries: of its microbatch, and of its token slice."""
    token_slice = f".{instruction.slice_index}" if sliced else ""
    return f"{instruction.microbatch}{token_slice}"


def phase_patches(shown: set[str]) -> list[Patch]:
    """Return the entries of a legend for the kinds of instructions in `shown`."""
    return [
        Patch(color=colour, label=kind) for kind, colour in PHASE_COLOURS.items() if kind in shown
    ]


def _kind(instruction: Instruction) -> str | None:
    """Return the colour key of an instruction, None for those that take no time."""
    if instruction.kind == "run":
        if instruction.task.startswith("train"):  # one task does both where there is no pipeline
            return "forward + backward"
        return instruction.phase if instruction.phase in PHASE_COLOURS else "forward"
    return instruction.kind if instruction.kind in ("send", "receive") else None
