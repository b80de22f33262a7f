"""The largest tensors in the picture of a plan, as squares cut as their sharding specs say."""

from __future__ import annotations

import math
import re

from attrs import evolve, frozen
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from alpa_interchange import TensorType
from alpa_interchange.mesh import LogicalMesh
from alpa_interchange.plan import ParallelPlan
from alpa_interchange.plan_text import number_text
from alpa_meta.report.style import CHARACTER, INK, cut_text, stage_colour
from alpa_meta.report.tensor_class import TensorClass, classify_tensors

MAX_DRAWN_TENSORS = 7  # in a column
MAX_COLUMNS = 4  # of stages that are not alike; `alpa show` has all
MAX_DRAWN_CUTS = 16  # along one side of a tensor
_SIDE = 0.8  # of a square, in rows
_ROW = 0.26  # inches
_NUMBERS = re.compile(r"\{[^}]*\}|\d+")


@frozen
class TensorColumn:
    """The largest tensors of some stages that are alike, in the colour of the first of them."""

    title: str
    stage: int
    mesh: LogicalMesh
    classes: tuple[TensorClass, ...]


def tensor_columns(plan: ParallelPlan) -> list[TensorColumn]:
    """Return the largest tensors by stage; stages whose tensors differ in numbers only are one."""
    found: dict[object, tuple[tuple[TensorClass, ...], list[int]]] = {}
    for stage, sharding in enumerate(plan.shardings):
        state = [
            (entry.path, entry.shape, entry.dtype)
            for entry in plan.program.inputs
            if entry.path in sharding.state_specs and entry.shape
        ]
        ordered = sorted(
            classify_tensors(state, sharding.state_specs),
            key=lambda kind: kind.count * TensorType(kind.shape, kind.dtype).bytes,
            reverse=True,
        )
        most = tuple(ordered[: 2 * MAX_DRAWN_TENSORS])
        alike = tuple((_anywhere(one.name), one.shape, one.spec, one.members) for one in most)
        key = (sharding.mesh.logical, alike[:MAX_DRAWN_TENSORS])
        found.setdefault(key, (most, []))[1].append(stage)
    columns = []
    for classes, stages in list(found.values())[:MAX_COLUMNS]:
        if len(stages) > 1:
            classes = tuple(evolve(one, name=_anywhere(one.name)) for one in classes)
        which = f"stage{'s' if len(stages) > 1 else ''} {number_text(stages)}"
        mesh = plan.shardings[stages[0]].mesh.logical
        columns.append(TensorColumn(f"{which}: largest tensors", stages[0], mesh, classes))
    if len(columns) > 1:
        return [evolve(one, classes=one.classes[:MAX_DRAWN_TENSORS]) for one in columns]
    (only,) = columns
    parts = only.classes[:MAX_DRAWN_TENSORS], only.classes[MAX_DRAWN_TENSORS:]
    return [
        evolve(only, title="" if place else only.title, classes=part)
        for place, part in enumerate(parts)
        if part or not place
    ]


def columns_height(columns: list[TensorColumn]) -> float:
    """Return the inches that columns need."""
    return 0.4 + _ROW * max(1, *(len(column.classes) for column in columns))


def draw_tensors(axes: Axes, column: TensorColumn, rows: int, width: float) -> None:
    """Draw the tensors of a column of `rows`, in a panel `width` inches wide.

    Rows of a square are the parts of dim 0, columns those of all other dims; the first device's
    part is filled.
    """
    most = int(width / CHARACTER) - 6
    for place, kind in enumerate(column.classes):
        sizes = [column.mesh.size(dim) for dim in kind.spec.dims]
        down = min(sizes[0], MAX_DRAWN_CUTS)
        across = min(math.prod(sizes[1:]), MAX_DRAWN_CUTS)
        height, breadth = _SIDE / down, _SIDE / across
        colour = stage_colour(column.stage)
        axes.add_patch(Rectangle((0, place), breadth, height, facecolor=colour, edgecolor="none"))
        for row in range(down):
            for number in range(across):
                axes.add_patch(
                    Rectangle(
                        (number * breadth, place + row * height),
                        breadth,
                        height,
                        facecolor="none",
                        edgecolor=INK,
                        linewidth=0.5,
                    )
                )
        text = cut_text(f"{kind.name}  {kind.spec}  {', '.join(kind.members)}", most)
        axes.text(_SIDE + 0.25, place + _SIDE / 2, text, va="center", fontsize=7, color=INK)
    axes.set_xlim(0, width / _ROW)
    axes.set_ylim(rows, -0.1)
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()
    axes.set_title(column.title, fontsize=9, color=INK, loc="left")


def _anywhere(name: str) -> str:
    """Return a name of a class with "*" for its numbers."""
    return _NUMBERS.sub("*", name)
