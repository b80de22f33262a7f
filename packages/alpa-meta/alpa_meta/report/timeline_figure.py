"""The picture of one step: every executed instruction of every mesh against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alpa_interchange.schedule import Instruction
from matplotlib.patches import Patch
from mesh_runtime import TraceEvent

from alpa_meta.report.style import INK, PHASE_COLOURS, figure_file, plain

ROW = 1.0
BOX = 0.62
LABEL_SHARE = 0.012  # a box narrower than this share of the step carries no number


def draw_timeline(
    path: Path, events: Sequence[TraceEvent], *, title: str, mesh_names: Sequence[str]
) -> None:
    """Write the executed instructions of one step as a PNG picture at `path`.

    One row per mesh; runs are boxes with the number of their microbatch, sends and receives thin bars
    below them. Times are in milliseconds from the first instruction.
    """
    if not events:
        raise ValueError("draw_timeline needs the events of at least one instruction, got none")
    origin = min(event.start for event in events)
    end = max(event.stop for event in events)
    unit, unit_name = (1e-3, "ms") if end - origin < 10 else (1.0, "s")
    num_meshes = len(mesh_names)
    with figure_file(path, 10.0, 1.5 + 0.62 * num_meshes) as figure:
        axes = plain(figure.subplots())
        shown = set()
        for event in events:
            kind = _kind(event.instruction)
            if kind is None:
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
            wide_enough = width >= LABEL_SHARE * (end - origin) / unit
            if is_run and wide_enough and event.instruction.microbatch is not None:
                axes.text(
                    left + width / 2,
                    top,
                    str(event.instruction.microbatch),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=INK,
                )
        axes.set_yticks([mesh * ROW for mesh in range(num_meshes)], list(mesh_names))
        axes.set_ylim(num_meshes * ROW - 0.35, -0.55)
        axes.set_xlim(0, (end - origin) / unit)
        axes.set_xlabel(f"time in the step, {unit_name}", color=INK, fontsize=9)
        axes.set_title(title, color=INK, fontsize=10, loc="left")
        figure.legend(
            handles=[
                Patch(color=PHASE_COLOURS[kind], label=kind) for kind in PHASE_COLOURS if kind in shown
            ],
            loc="outside lower center",
            ncols=len(PHASE_COLOURS),
            frameon=False,
            fontsize=8,
        )


def _kind(instruction: Instruction) -> str | None:
    """Return the colour key of an instruction, None for those that take no time."""
    if instruction.kind == "run":
        return instruction.phase or "forward"
    return instruction.kind if instruction.kind in ("send", "receive") else None
