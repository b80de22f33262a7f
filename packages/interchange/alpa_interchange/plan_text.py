"""A plan in a few lines for people: `repr`, `str` and a table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from alpa_interchange.amounts import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from alpa_interchange.mesh import LogicalMesh
    from alpa_interchange.plan import ParallelPlan

COLUMNS = ("stage", "layers", "devices", "mesh", "forward", "backward", "memory")
"""Of the table of stages; forward and backward per microbatch, memory per device."""


def one_line(plan: ParallelPlan) -> str:
    """Return what was chosen, for which cluster, and what it is predicted to cost."""
    proven = f"gap {100 * plan.gap:.1f} %" if plan.lower_bound else "not searched for"
    return (
        f"{counted(plan.num_stages, 'stage')}, "
        f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')}, "
        f"{plan.stage_plan.schedule} on {counted(plan.cluster.num_devices, 'device')} of "
        f"{plan.cluster.name}: {format_seconds(plan.step_seconds)} per step, "
        f"{format_bytes(max(plan.device_bytes))} per device, {proven}"
    )


def stage_rows(plan: ParallelPlan) -> list[Sequence[str]]:
    """Return the columns of `COLUMNS` for every stage."""
    rows: list[Sequence[str]] = []
    for number, (stage, sharding, bytes) in enumerate(
        zip(plan.stage_plan.stages, plan.shardings, plan.device_bytes, strict=True)
    ):
        one = stage.candidate
        rows.append(
            (
                str(number),
                number_text(range(one.layer_start, one.layer_stop)),
                f"{one.submesh.num_hosts} x {one.submesh.devices_per_host}",
                mesh_text(sharding.mesh.logical),
                format_seconds(one.forward_seconds),
                format_seconds(one.backward_seconds),
                format_bytes(bytes),
            )
        )
    return rows


def mesh_text(mesh: LogicalMesh) -> str:
    """Return a logical mesh as "data 2 x model 4"."""
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes) or "1"


def number_text(numbers: Iterable[int]) -> str:
    """Return numbers as "0-3, 8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def plan_text(plan: ParallelPlan) -> str:
    """Return the line and the table of stages as plain text."""
    rows = [COLUMNS, *stage_rows(plan)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([one_line(plan), *lines])


def plan_html(plan: ParallelPlan) -> str:
    """Return the line and the table of stages as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in stage_rows(plan)
    )
    return (
        f"<p>{escape(one_line(plan))}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
