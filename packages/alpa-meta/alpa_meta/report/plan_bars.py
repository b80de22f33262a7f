"""The bars in the picture of a plan: what its step goes to, memory, and the next best settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from attrs import astuple
from matplotlib.axes import Axes

from alpa_interchange.amounts import format_bytes, format_seconds
from alpa_interchange.plan import ParallelPlan
from alpa_meta.planning.explanation import Alternative, Explanation, described
from alpa_meta.report.plan_changes import signed
from alpa_meta.report.plan_difference import TimeSplit
from alpa_meta.report.style import INK, MEMORY_COLOURS, SERIES_COLOURS, TIME_COLOURS, plain

MAX_NAMED_BARS = 2  # more are numbered
MAX_NUMBERED_BARS = 20  # of more every second, third, ... is: two digits are as wide as the bar
MAX_SETTINGS = 4  # beside the chosen one


def draw_time(axes: Axes, splits: Sequence[TimeSplit]) -> None:
    """Draw what each mesh spends the predicted step on as stacked bars."""
    largest = max(sum(astuple(split)) for split in splits)
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, unit = next((unit for unit in units if largest >= unit[0]), units[-1])
    parts = {
        name: [getattr(split, name) / scale for split in splits]
        for name in TIME_COLOURS
        if any(getattr(split, name) > 1e-3 * largest for split in splits)
    }
    _stack(axes, parts, TIME_COLOURS, [f"mesh {index}" for index in range(len(splits))])
    axes.set_ylabel(unit, fontsize=8, color=INK)
    axes.set_title("predicted step,\nby what it goes to", fontsize=9, color=INK, loc="left")


def draw_memory(axes: Axes, plan: ParallelPlan) -> None:
    """Draw the predicted memory per device of each stage, or mesh of several, as stacked bars."""
    largest = max(plan.device_bytes)
    units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
    scale, unit = next((unit for unit in units if largest >= unit[0]), units[-1])
    bars = [sharding.memory for sharding in plan.shardings]
    if plan.stage_plan.device_bytes:
        bars = [_of_mesh(plan, mesh) for mesh in range(plan.stage_plan.num_meshes)]
    named = [name for bar in bars for name in bar]
    parts = {
        name: [bar.get(name, 0.0) / scale for bar in bars]
        for name in dict.fromkeys((*MEMORY_COLOURS, *named))
        if name in named
    }
    kind = "mesh" if plan.stage_plan.device_bytes else "stage"
    _stack(axes, parts, MEMORY_COLOURS, [f"{kind} {index}" for index in range(len(bars))])
    axes.set_ylabel(unit, fontsize=8, color=INK)
    capacity = format_bytes(min(group.device.memory for group in plan.cluster.host_groups))
    axes.set_title(
        f"memory per device\n(a device has {capacity})", fontsize=9, color=INK, loc="left"
    )


def _of_mesh(plan: ParallelPlan, mesh: int) -> Mapping[str, float]:
    """Return the bytes by name of a mesh's devices with all stages that it runs: one of these at a
    time has its temporaries, and what is alive together is less than the most of each."""
    own = [one.memory for one in plan.shardings[mesh :: plan.stage_plan.num_meshes]]
    names = dict.fromkeys(name for one in own for name in one)
    found = {name: sum(one.get(name, 0.0) for one in own) for name in names}
    found["temporaries"] = max(one.get("temporaries", 0.0) for one in own)
    others = sum(bytes for name, bytes in found.items() if name != "activations")
    found["activations"] = max(plan.device_bytes[mesh] - others, 0.0)
    return found


def draw_settings(axes: Axes, plan: ParallelPlan, found: Explanation) -> None:
    """Draw the step of the plan and of the next best settings, in the prices of its menu."""
    others: dict[str, tuple[float, bool]] = {}
    for one in sorted(found.alternatives, key=lambda one: one.seconds or 0.0):
        if one.seconds is not None and not one.lacking_bytes:
            others.setdefault(_setting(one), (one.seconds, one.distinct))
    shown = list(others.items())[:MAX_SETTINGS]
    bars = [(described(plan.stage_plan), 0.0, True), *((name, *price) for name, price in shown)]
    axes.barh(
        range(len(bars)),
        [found.menu_seconds + more for _, more, _ in bars],
        0.35,
        color=[SERIES_COLOURS[0], *["#cccccc"] * len(shown)],
    )
    for place, (name, more, distinct) in enumerate(bars):
        price = format_seconds(found.menu_seconds) if not place else signed(more)
        text = f"{name}: {price}{'' if distinct else ' ?'}"
        axes.annotate(
            text,
            (0, place - 0.2),
            xytext=(0, 2),
            textcoords="offset points",
            fontsize=7,
            color=INK,
        )
    axes.set_ylim(max(len(bars), MAX_SETTINGS + 1) - 0.7, -0.8)
    axes.set_xlim(left=0)
    axes.set_axis_off()
    doubt = all(distinct for _, _, distinct in bars)
    note = "by the plan's menu" if doubt else "?: within the error of predictions"
    axes.set_title(
        f"chosen, and the next best settings\n({note})", fontsize=9, color=INK, loc="left"
    )


def _setting(one: Alternative) -> str:
    """Return what differs from the plan: of decisions about meshes the mesh instead."""
    return f"on {one.instead.partition(' (')[0]}" if one.where else one.instead


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
    if len(names) <= MAX_NAMED_BARS:
        axes.set_xticks(places, names)
    else:
        every = -(-len(names) // MAX_NUMBERED_BARS)
        labels = [name.split()[-1] for name in names[::every]]
        axes.set_xticks(places[::every], labels, fontsize=7 if len(names) > 8 else 8)
        axes.set_xlabel(names[0].split()[0], fontsize=8, color=INK)
    axes.set_xlim(-0.75, len(names) - 0.25)
    axes.legend(
        fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True
    )
