"""Explanations, comparisons and re-planned pipelines as tables on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, fields
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import stage_dp
from alpa_interchange.amounts import format_bandwidth, format_bytes, format_seconds
from alpa_interchange.menu import JointPlan
from alpa_interchange.plan_text import mesh_text, number_text
from alpa_meta.planning.explanation import Explanation, described
from alpa_meta.planning.replanning import Replanned
from alpa_meta.planning.state_moves import Move, StateMoves, by_kind
from alpa_meta.planning.thresholds import Threshold
from alpa_meta.report.plan_difference import PlanDifference, TimeSplit

if TYPE_CHECKING:
    from attrs import AttrsInstance

WORDS = {"selective": "selectively", "full": "in full"}
MAX_ROWS = 24  # of tensors, unless all are asked for


def as_json(value: AttrsInstance) -> str:
    """Return a value made of attrs classes as JSON."""
    return json.dumps(asdict(value), indent=1)


def replanned_json(
    found: Replanned, thresholds: Sequence[Threshold], moves: StateMoves | None
) -> str:
    """Return a re-planned pipeline with its thresholds and moves as JSON."""
    hidden = ("base", "rows", "meshes", "menu", "problem")
    record = asdict(found, filter=lambda attribute, _: attribute.name not in hidden)
    record["meshes"] = [
        {"submesh": asdict(submesh), "logical": asdict(logical)}
        for submesh, logical in found.meshes
    ]
    record["settings"] = dict(found.settings)
    record["thresholds"] = list(map(asdict, thresholds))
    if moves is not None:
        record["moves"] = asdict(moves)
    return json.dumps(record, indent=1)


def signed(seconds: float) -> str:
    """Return a difference in seconds as "+3.1 ms"."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}" if seconds else "0 s"


def print_explanation(found: Explanation, console: Console) -> None:
    """Show the decisions of a plan with the price of their alternatives."""
    table = _table("decisions and their next best alternatives")
    for column in ("decision", "where", "chosen", "instead"):
        table.add_column(column)
    table.add_column("step", justify="right")
    table.add_column("memory lacking", justify="right")
    for one in found.alternatives:
        seconds = "none in the menu" if one.seconds is None else signed(one.seconds)
        if not one.distinct:
            seconds = f"{seconds} ?"
        lacking = ""
        if one.lacking_bytes:
            lacking = f"{format_bytes(one.lacking_bytes)} on stage {one.stage}"
        _add(table, one.decision, one.where, one.chosen, one.instead, seconds, lacking)
    console.print(table)
    console.print(
        f"The plan takes {format_seconds(found.step_seconds)} a step, and "
        f"{format_seconds(found.menu_seconds)} in the prices of its menu, which alternatives are "
        "compared with; with memory lacking, as if it were there."
    )
    if not all(one.distinct for one in found.alternatives):
        console.print("?: within the error of predictions; measure both to tell them apart.")


def draw_explanation(path: Path, found: Explanation) -> None:
    """Write a picture of what the alternatives cost as PNG at `path`."""
    from matplotlib.patches import Patch

    from alpa_meta.report.style import INK, SERIES_COLOURS, figure_file, plain

    colours = {
        "beyond the error of predictions": SERIES_COLOURS[0],
        "within the error of predictions": SERIES_COLOURS[5],
        "does not fit the memory": SERIES_COLOURS[1],
    }
    sure, doubtful, lacking = colours
    shown = [one for one in found.alternatives if one.seconds is not None][::-1]
    kinds = [lacking if one.lacking_bytes else sure if one.distinct else doubtful for one in shown]
    with figure_file(path, 10.0, 1.6 + 0.28 * len(shown)) as figure:
        axes = plain(figure.subplots())
        shares = [100 * (one.seconds or 0.0) / found.menu_seconds for one in shown]
        axes.barh(range(len(shown)), shares, color=[colours[kind] for kind in kinds])
        labels = [
            f"{one.decision}{f' of {one.where}' if one.where else ''}: {one.instead}"
            for one in shown
        ]
        axes.set_yticks(range(len(shown)), labels, fontsize=7)
        axes.set_xscale("symlog", linthresh=1.0)
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:+g} %" if share else "0")
        axes.axvline(0.0, color=INK, linewidth=0.8)
        axes.set_xlabel("step time, beside that of the plan", color=INK, fontsize=8)
        figure.suptitle(
            "what the next best alternative of each decision would cost: the plan takes "
            f"{format_seconds(found.menu_seconds)} in the prices of its menu",
            color=INK,
            fontsize=9,
        )
        figure.legend(
            handles=[Patch(color=c, label=kind) for kind, c in colours.items() if kind in kinds],
            loc="outside lower center",
            ncols=len(colours),
            frameon=False,
            fontsize=8,
        )


def print_difference(names: Sequence[str], found: PlanDifference, console: Console) -> None:
    """Show two plans beside one another."""
    table = _table("predicted, per step")
    for column in ("", *names):
        table.add_column(column, justify="right" if column else "left")
    for label, texts in _cost_rows(found):
        _add(table, label, *texts)
    console.print(table)
    for title, rows in (
        ("decisions that differ", found.decisions),
        ("state that lies differently", found.shardings),
    ):
        if not rows:
            console.print(f"{title}: none")
            continue
        table = _table(title)
        for column in ("", *names):
            table.add_column(column, overflow="fold")  # paths are cut to nothing otherwise
        for row in rows[:MAX_ROWS]:
            _add(table, row.what, row.first, row.second)
        if len(rows) > MAX_ROWS:
            _add(table, f"and {len(rows) - MAX_ROWS} more (--json)", "", "")
        console.print(table)


def _cost_rows(found: PlanDifference) -> Iterator[tuple[str, list[str]]]:
    yield "step", [format_seconds(one.step_seconds) for one in found.costs]
    for field in fields(TimeSplit):
        yield (
            f"  {field.name}",
            [
                "unknown" if one.time is None else format_seconds(getattr(one.time, field.name))
                for one in found.costs
            ],
        )
    yield "no plan below", [format_seconds(one.lower_bound) for one in found.costs]
    for mesh in range(max(len(one.device_bytes) for one in found.costs)):
        yield (
            f"memory of mesh {mesh}",
            [
                format_bytes(one.device_bytes[mesh]) if mesh < len(one.device_bytes) else ""
                for one in found.costs
            ],
        )


def print_replanned(found: Replanned, console: Console) -> None:
    """Show a re-planned pipeline beside the old one."""
    plan, held = found.plan, stage_dp.device_bytes(found.plan)
    table = _table(f"re-planned for {found.cluster.name}, {found.cluster.num_devices} devices")
    for column in ("stage", "layers", "devices", "logical mesh", "recomputed", "forward"):
        table.add_column(column)
    for column in ("backward", "memory"):
        table.add_column(column, justify="right")
    for number, (stage, (_, logical)) in enumerate(zip(plan.stages, found.meshes, strict=True)):
        kinds = [row.recomputation for row in found.rows[stage.layer_start : stage.layer_stop]]
        _add(
            table,
            str(number),
            number_text(range(stage.layer_start, stage.layer_stop)),
            number_text(stage.device_ids),
            mesh_text(logical),
            " ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds) if k != "none"),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            format_bytes(held[number]),
        )
    console.print(table)
    console.print(_verdict(found), markup=False)
    proven = "no plan" if found.bound_holds else "no plan of the menu's rows"
    least, most = min(found.counts), max(found.counts)
    proven += f" with {least} to {most} microbatches" if least < most else ""
    console.print(
        f"In the prices of the menu: {format_seconds(found.before_seconds)} a step before, "
        f"{format_seconds(plan.step_seconds)} now ({described(plan)}).\n"
        f"Rows are those kept for the old plan, so that a plan anew may be faster; {proven} takes "
        f"less than {format_seconds(found.bound)}. Planned in "
        f"{format_seconds(found.planning_seconds)}."
    )
    console.print("plan it in full with " + ", ".join(_options(found)), markup=False)


def _verdict(found: Replanned) -> str:
    if not found.changed:
        return "The plan does not change."
    if found.lacking_bytes:
        return f"The old plan does not fit: it lacks {format_bytes(found.lacking_bytes)} a device."
    if found.kept_seconds is None:
        return "The old plan needs other devices than there are."
    return f"The old plan would take {format_seconds(found.kept_seconds)}."


def _options(found: Replanned) -> Iterator[str]:
    for name, value in found.settings.items():
        if name == "recompute" and isinstance(value, tuple) and set(value) == {"none"}:
            value = "none"
        yield f"{name}={value!r}"


def print_thresholds(thresholds: Iterable[Threshold], console: Console) -> None:
    """Show where the plan changes."""
    table = _table("where the plan changes")
    for column in ("what", "below", "at", "above"):
        table.add_column(column)
    for one in thresholds:
        value = format_bytes(one.value) if one.what == "memory" else format_bandwidth(one.value)
        below = _plan_text(one.below, one.below_recompute)
        _add(table, one.what, below, value, _plan_text(one.above, one.above_recompute))
    if table.row_count:
        console.print(table)
    else:
        console.print("the plan does not change near these values")


def _plan_text(plan: JointPlan | None, recompute: Sequence[str]) -> str:
    """Return a pipeline with what thresholds tell apart: its cuts and what it recomputes."""
    if plan is None:
        return "none fits"
    layers = " + ".join(str(stage.layer_stop - stage.layer_start) for stage in plan.stages)
    parts = [described(plan)]
    if len(plan.stages) > 1:
        parts.append(f"{layers} layers")
    for kind in dict.fromkeys(recompute):
        if kind != "none":
            which = number_text(k for k, one in enumerate(recompute) if one == kind)
            parts.append(f"{which} recomputed {WORDS.get(kind, kind)}")
    return f"{', '.join(parts)}: {_exact(plan.step_seconds)}"


def _exact(seconds: float) -> str:
    """Return seconds with four digits: what thresholds tell apart is often less than a per cent."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def print_moves(found: StateMoves, console: Console) -> None:
    """Show what of the state must move."""
    table = _table("state that must move")
    for column in ("array", "from", "to"):
        table.add_column(column)
    for column in ("inside hosts", "between hosts", "seconds"):
        table.add_column(column, justify="right")
    ordered = sorted(found.moves, key=lambda one: -one.seconds)
    for one in ordered[:MAX_ROWS]:
        _add(
            table,
            _name(one),
            number_text(one.source),
            number_text(one.target),
            format_bytes(one.bytes_within_hosts),
            format_bytes(one.bytes_between_hosts),
            format_seconds(one.seconds),
        )
    if len(ordered) > MAX_ROWS:
        _add(table, f"and {len(ordered) - MAX_ROWS} more (--json)", "", "", "", "", "")
    if ordered:
        console.print(table)
    amounts = ", ".join(f"{format_bytes(size)} {link}" for link, size in by_kind(found).items())
    console.print(
        f"{len(ordered)} arrays or parts move, {amounts}: {format_seconds(found.seconds)} one "
        f"after the other, at least {format_seconds(found.least_seconds)}"
    )


def _name(move: Move) -> str:
    return move.path if move.start is None else f"{move.path}[{move.start}:{move.stop}]"


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text: specs and paths have brackets, which are no markup."""
    table.add_row(*map(escape, cells))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
