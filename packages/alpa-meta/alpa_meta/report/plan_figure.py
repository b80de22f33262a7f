"""The picture of a plan: layers, the devices of each stage, what the step goes to, memory, and the
predicted schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import astuple
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from alpa_interchange import TensorType
from alpa_interchange.amounts import counted, format_bytes, format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_interchange.plan_text import mesh_text, number_text
from alpa_meta.report.plan_difference import TimeSplit, time_splits
from alpa_meta.report.plan_table import layer_text
from alpa_meta.report.predicted_events import predicted_events
from alpa_meta.report.style import (
    INK,
    MEMORY_COLOURS,
    SERIES_COLOURS,
    TIME_COLOURS,
    figure_file,
    plain,
)
from alpa_meta.report.tensor_class import classify_tensors
from alpa_meta.report.timeline_figure import phase_patches, plot_events

MAX_DRAWN_TENSORS = 7  # per stage, the largest
MAX_TENSOR_PANELS = 4  # stages beyond are like these, or are shown by `alpa show`
MAX_MESH_PANELS = 6  # beside the bars
MAX_NAMED_BARS = 2  # more are numbered
MAX_DRAWN_CUTS = 16  # along one side of a tensor
MAX_DRAWN_DEVICES = 64  # per stage; larger meshes are drawn as one block


def draw_plan(path: Path, plan: ParallelPlan) -> None:
    """Write a picture of `plan` as PNG at `path`."""
    num_stages = plan.num_stages
    columns = min(num_stages, MAX_TENSOR_PANELS)
    heights = [0.8, 2.3, 0.35 + 0.26 * MAX_DRAWN_TENSORS, 1.3 + 0.45 * num_stages]
    with figure_file(path, 11.0, sum(heights) + 0.3) as figure:
        rows: Any = figure.subfigures(4, 1, height_ratios=heights)
        title = (
            f"{plan.cluster.name}: {counted(num_stages, 'stage')}, "
            f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')}, "
            f"{plan.stage_plan.schedule}; predicted {format_seconds(plan.step_seconds)} per step, "
            f"proven gap {100 * plan.gap:.1f} %"
        )
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
        _draw_layers(rows[0].subplots(), plan)
        splits = time_splits(plan)
        drawn = min(num_stages, MAX_MESH_PANELS)
        figures = 1 + (splits is not None)
        wide = [1.0] * drawn + [max(1.0, 0.25 * num_stages)] * figures
        panels = rows[1].subplots(1, drawn + figures, squeeze=False, width_ratios=wide)[0]
        for index in range(drawn):
            _draw_devices(panels[index], plan, index)
        if splits is not None:
            _draw_time(panels[drawn], splits)
        _draw_memory(panels[-1], plan)
        for index, axes in enumerate(rows[2].subplots(1, columns, squeeze=False)[0]):
            _draw_tensors(axes, plan, index)
        axes = plain(rows[3].subplots())
        shown = plot_events(axes, predicted_events(plan), _mesh_names(plan))
        axes.set_title("predicted schedule", fontsize=9, color=INK, loc="left")
        rows[3].legend(
            handles=phase_patches(shown),
            loc="outside lower center",
            ncols=6,
            frameon=False,
            fontsize=8,
        )


def _draw_layers(axes: Axes, plan: ParallelPlan) -> None:
    """Draw the layers as boxes as wide as their work, in the colour of their stage."""
    axes.set_axis_off()
    work = np.array([layer.forward_flops + layer.backward_flops for layer in plan.layers])
    total = max(float(work.sum()), 1.0)
    widths = np.maximum(work / total, 0.02)
    starts = np.concatenate([[0.0], np.cumsum(widths)])
    cuts = plan.layer_cuts
    for layer, left, width in zip(plan.layers, starts[:-1], widths, strict=True):
        stage = sum(layer.index >= cut for cut in cuts)
        box = Rectangle(
            (left, 0), width, 1, facecolor=_colour(stage), edgecolor="white", linewidth=1
        )
        axes.add_patch(box)
        if width / starts[-1] > 0.025:
            axes.text(
                left + width / 2,
                0.5,
                str(layer.index),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
    axes.set_xlim(0, starts[-1])
    axes.set_ylim(0, 1)
    axes.set_title("layers, as wide as their work", fontsize=9, color=INK, loc="left")


def _draw_devices(axes: Axes, plan: ParallelPlan, index: int) -> None:
    """Draw the devices of one stage as the grid of its logical mesh."""
    mesh = plan.shardings[index].mesh
    shape = mesh.logical.shape or (1,)
    columns = shape[-1] if mesh.logical.num_devices <= MAX_DRAWN_DEVICES else 1
    rows = mesh.logical.num_devices // columns if columns > 1 or len(shape) > 1 else 1
    if mesh.logical.num_devices > MAX_DRAWN_DEVICES:
        rows = columns = 1
    ids = np.array(mesh.device_ids)
    labels = (
        [number_text(ids)]
        if rows * columns != ids.size
        else [str(number) for number in ids.tolist()]
    )
    for position, label in enumerate(labels):
        row, column = divmod(position, columns)
        axes.add_patch(
            Rectangle(
                (column + 0.06, row + 0.06),
                0.88,
                0.88,
                facecolor=_colour(index),
                alpha=0.85,
                edgecolor="none",
            )
        )
        axes.text(
            column + 0.5, row + 0.5, label, ha="center", va="center", fontsize=8, color="white"
        )
    axes.set_xlim(0, max(columns, 1))
    axes.set_ylim(max(rows, 1), 0)
    axes.set_aspect("equal", anchor="N")
    axes.set_axis_off()
    axes.set_title(
        f"stage {index}: layers {layer_text(plan, index)}\nmesh {mesh_text(mesh.logical)}",
        fontsize=9,
        color=INK,
        loc="left",
    )


def _draw_tensors(axes: Axes, plan: ParallelPlan, index: int) -> None:
    """Draw the largest tensors of one stage as squares cut as their sharding specs say.

    Rows are the cuts of dim 0, columns those of all other dims; the first device's part is filled.
    """
    sharding = plan.shardings[index]
    state = [
        (entry.path, entry.shape, entry.dtype)
        for entry in plan.program.inputs
        if entry.path in sharding.state_specs and entry.shape
    ]
    classes = sorted(
        classify_tensors(state, sharding.state_specs),
        key=lambda kind: kind.count * TensorType(kind.shape, kind.dtype).bytes,
        reverse=True,
    )
    for place, kind in enumerate(classes[:MAX_DRAWN_TENSORS]):
        sizes = [sharding.mesh.logical.size(dim) for dim in kind.spec.dims]
        cuts = (min(sizes[0], MAX_DRAWN_CUTS), min(math.prod(sizes[1:]), MAX_DRAWN_CUTS))
        top, side = float(place), 0.8
        height, width = side / cuts[0], side / cuts[1]
        axes.add_patch(
            Rectangle((0, top), width, height, facecolor=_colour(index), edgecolor="none")
        )
        for row in range(cuts[0]):
            for column in range(cuts[1]):
                axes.add_patch(
                    Rectangle(
                        (column * width, top + row * height),
                        width,
                        height,
                        facecolor="none",
                        edgecolor=INK,
                        linewidth=0.5,
                    )
                )
        text = f"{kind.name}  {kind.spec}  {', '.join(kind.members)}"
        axes.text(side + 0.25, top + side / 2, text, va="center", fontsize=7, color=INK)
    axes.set_xlim(0, 12)
    axes.set_ylim(MAX_DRAWN_TENSORS, -0.1)
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()
    axes.set_title(f"stage {index}: largest tensors", fontsize=9, color=INK, loc="left")


def _draw_time(axes: Axes, splits: Sequence[TimeSplit]) -> None:
    """Draw what each mesh spends the predicted step on as stacked bars."""
    largest = max(sum(astuple(split)) for split in splits)
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    scale, unit = next((unit for unit in units if largest >= unit[0]), units[-1])
    parts = {
        name: [getattr(split, name) / scale for split in splits]
        for name in TIME_COLOURS
        if any(getattr(split, name) > 1e-3 * largest for split in splits)
    }
    _stack(axes, parts, TIME_COLOURS, [f"mesh {index}" for index in range(len(splits))])
    axes.set_ylabel(unit, fontsize=8, color=INK)
    axes.set_title("predicted step,\nby what it goes to", fontsize=9, color=INK, loc="left")


def _draw_memory(axes: Axes, plan: ParallelPlan) -> None:
    """Draw the predicted memory per device of each stage as stacked bars."""
    largest = max(sharding.peak_bytes for sharding in plan.shardings)
    units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
    scale, unit = next((unit for unit in units if largest >= unit[0]), units[-1])
    named = [name for sharding in plan.shardings for name in sharding.memory]
    parts = {
        name: [sharding.memory.get(name, 0.0) / scale for sharding in plan.shardings]
        for name in dict.fromkeys((*MEMORY_COLOURS, *named))
        if name in named
    }
    stages = [f"stage {index}" for index in range(plan.num_stages)]
    _stack(axes, parts, MEMORY_COLOURS, stages)
    axes.set_ylabel(unit, fontsize=8, color=INK)
    capacity = format_bytes(min(group.device.memory for group in plan.cluster.host_groups))
    axes.set_title(
        f"memory per device\n(a device has {capacity})", fontsize=9, color=INK, loc="left"
    )


def _stack(
    axes: Axes,
    parts: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    names: Sequence[str],
) -> None:
    """Draw a stacked bar for every name, of `parts` [names] from the bottom up."""
    plain(axes)
    places = np.arange(len(names))
    bottom = np.zeros(len(names))
    others = itertools.cycle(SERIES_COLOURS[::-1])
    for name, amounts in parts.items():
        colour = colours.get(name) or next(others)
        axes.bar(places, amounts, 0.6, bottom=bottom, color=colour, label=name)
        bottom += np.array(amounts)
    short = len(names) > MAX_NAMED_BARS  # names would run into each other
    axes.set_xticks(places, [name.split()[-1] for name in names] if short else names)
    if short:
        axes.set_xlabel(names[0].split()[0], fontsize=8, color=INK)
    axes.set_xlim(-0.75, max(len(names), 2) - 0.25)
    axes.legend(
        fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True
    )


def _colour(stage: int) -> str:
    return SERIES_COLOURS[stage % len(SERIES_COLOURS)]


def _mesh_names(plan: ParallelPlan) -> Sequence[str]:
    return [f"mesh {index}" for index in range(plan.stage_plan.num_meshes)]
