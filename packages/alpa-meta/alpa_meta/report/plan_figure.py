"""The picture of a plan: layers, the devices of each stage, what the step goes to, memory, the
next best settings, how the largest tensors are sharded, and the predicted schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from alpa_interchange import DeviceMesh
from alpa_interchange.amounts import counted, format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_interchange.plan_text import mesh_text, number_text
from alpa_meta.planning.explanation import Explanation
from alpa_meta.report.plan_bars import draw_memory, draw_settings, draw_time
from alpa_meta.report.plan_difference import time_splits
from alpa_meta.report.plan_table import layer_text
from alpa_meta.report.plan_tensors import columns_height, draw_tensors, tensor_columns
from alpa_meta.report.predicted_events import predicted_events
from alpa_meta.report.style import CHARACTER, INK, cut_text, figure_file, stage_colour
from alpa_meta.report.timeline_figure import plot_schedule, schedule_height
from alpa_meta.types import Private

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

WIDTH = 11.0  # inches
MAX_MESHES_IN_A_ROW = 8
MAX_DRAWN_DEVICES = 64  # per mesh; larger ones are drawn as one block
MAX_DEVICE_ROWS = 4  # of full height; more are drawn lower


def draw_plan(path: Path, plan: ParallelPlan, found: Explanation | None = None) -> None:
    """Write a picture of `plan` as PNG at `path`, with the next best settings where `found` says
    what they cost."""
    num_stages = plan.num_stages
    meshes = _meshes(plan)
    across = min(len(meshes), MAX_MESHES_IN_A_ROW)
    down = -(-len(meshes) // across)
    device_rows = min(max(_grid(mesh)[0] for mesh, _ in meshes), MAX_DEVICE_ROWS)
    tensors = tensor_columns(plan)
    events = predicted_events(plan)
    heights = [
        0.85,
        down * (0.65 + 0.27 * device_rows),
        2.3,
        columns_height(tensors),
        schedule_height(plan.stage_plan.num_meshes),
    ]
    with figure_file(path, WIDTH, sum(heights) + 0.3) as figure:
        rows: Private = figure.subfigures(len(heights), 1, height_ratios=heights)
        title = (
            f"{plan.cluster.name}: {counted(num_stages, 'stage')}, "
            f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')}, "
            f"{plan.stage_plan.schedule}; predicted {format_seconds(plan.step_seconds)} per step, "
            f"proven gap {100 * plan.gap:.1f} %"
        )
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
        _draw_layers(rows[0].subplots(), plan)
        panels = rows[1].subplots(down, across, squeeze=False).flat
        for place, axes in enumerate(panels):
            if place < len(meshes):
                _draw_devices(axes, plan, *meshes[place], WIDTH / across)
            else:
                axes.set_axis_off()
        _draw_bars(rows[2], plan, found)
        most_rows = max(len(column.classes) for column in tensors)
        columns = rows[3].subplots(1, len(tensors), squeeze=False)[0]
        for axes, column in zip(columns, tensors, strict=True):
            draw_tensors(axes, column, most_rows, WIDTH / len(tensors))
        names = [f"mesh {index}" for index in range(plan.stage_plan.num_meshes)]
        plot_schedule(rows[4], events, names, title="predicted schedule")


def _draw_bars(figure: SubFigure, plan: ParallelPlan, found: Explanation | None) -> None:
    """Draw what the step goes to, the memory, and the next best settings, as far as known."""
    splits = time_splits(plan)
    panels = list(
        figure.subplots(1, 1 + (splits is not None) + (found is not None), squeeze=False)[0]
    )
    if splits is not None:
        draw_time(panels.pop(0), splits)
    draw_memory(panels.pop(0), plan)
    if found is not None:
        draw_settings(panels.pop(0), plan, found)


def _meshes(plan: ParallelPlan) -> list[tuple[DeviceMesh, list[int]]]:
    """Return the meshes of a plan, each with the stages that run on it."""
    found: dict[tuple[object, ...], tuple[DeviceMesh, list[int]]] = {}
    for stage, sharding in enumerate(plan.shardings):
        mesh = sharding.mesh
        found.setdefault((mesh.logical, mesh.device_ids), (mesh, []))[1].append(stage)
    return list(found.values())


def _draw_layers(axes: Axes, plan: ParallelPlan) -> None:
    """Draw the layers as boxes as wide as their work, in the colour of their stage."""
    axes.set_axis_off()
    work = np.array([layer.forward_flops + layer.backward_flops for layer in plan.layers])
    total = max(float(work.sum()), 1.0)
    widths = np.maximum(work / total, 0.02)
    starts = np.concatenate([[0.0], np.cumsum(widths)])
    inch = starts[-1] / WIDTH
    cuts = plan.layer_cuts
    stage_of = [sum(layer.index >= cut for cut in cuts) for layer in plan.layers]
    for layer, left, width, stage in zip(plan.layers, starts[:-1], widths, stage_of, strict=True):
        box = Rectangle(
            (left, 0), width, 1, facecolor=stage_colour(stage), edgecolor="white", linewidth=1
        )
        axes.add_patch(box)
        if width > 1.2 * CHARACTER * len(str(layer.index)) * inch:
            axes.text(
                left + width / 2,
                0.5,
                str(layer.index),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
    for stage in range(plan.num_stages):
        own = [place for place, other in enumerate(stage_of) if other == stage]
        if own:
            left, right = starts[own[0]], starts[own[-1] + 1]
            name = f"stage {stage}"
            fits = right - left > CHARACTER * len(name) * inch
            axes.text(
                (left + right) / 2,
                -0.12,
                name if fits else str(stage),
                ha="center",
                va="top",
                fontsize=7,
                color=INK,
            )
    axes.set_xlim(0, starts[-1])
    axes.set_ylim(-0.5, 1)
    axes.set_title("layers, as wide as their work", fontsize=9, color=INK, loc="left")


def _grid(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the rows and columns that the devices of a mesh are drawn in: its last axis across."""
    count = mesh.logical.num_devices
    if count > MAX_DRAWN_DEVICES:
        return 1, 1
    columns = mesh.logical.shape[-1] if mesh.logical.shape else 1
    return count // columns, columns


def _draw_devices(
    axes: Axes, plan: ParallelPlan, mesh: DeviceMesh, stages: Sequence[int], width: float
) -> None:
    """Draw the devices of one mesh as its logical grid, in a panel `width` inches wide."""
    rows, columns = _grid(mesh)
    ids = number_text(mesh.device_ids)
    labels = [str(number) for number in mesh.device_ids] if rows * columns > 1 else [ids]
    colours = [stage_colour(stage) for stage in stages]
    fits = 0.9 * width / columns > CHARACTER * max(map(len, labels)) and rows <= MAX_DEVICE_ROWS
    for position, label in enumerate(labels):
        row, column = divmod(position, columns)
        # The first stage's colour carries the number; other stages of the mesh are strips below.
        strip = 0.3 / (len(colours) - 1) if len(colours) > 1 else 0.0
        edges = [0.08, *(0.92 - strip * left for left in range(len(colours) - 1, -1, -1))]
        for colour, top, bottom in zip(colours, edges, edges[1:], strict=False):
            axes.add_patch(
                Rectangle((column + 0.03, row + top), 0.94, bottom - top, facecolor=colour)
            )
        if fits:
            axes.text(
                column + 0.5,
                row + sum(edges[:2]) / 2,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_axis_off()
    which = _numbered("stage", number_text(stages))
    layers = _numbered("layer", ", ".join(layer_text(plan, stage) for stage in stages))
    shape = f"{mesh_text(mesh.logical)}, {_numbered('device', ids)}"
    most = int(width / CHARACTER)
    lines = [f"{which}: {layers}", f"mesh {shape}"]
    if len(lines[0]) > most:
        lines = [which, layers, shape]
    axes.set_title(
        "\n".join(cut_text(line, most) for line in lines), fontsize=7.5, color=INK, loc="left"
    )


def _numbered(noun: str, numbers: str) -> str:
    """Return "layer 3" or "layers 3-5"."""
    return f"{noun} {numbers}" if numbers.isdecimal() else f"{noun}s {numbers}"
