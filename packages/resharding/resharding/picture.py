"""A drawing of a plan: what each device sends and takes in over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from alpa_interchange.amounts import format_bytes, format_seconds
from alpa_interchange.reshard import ReshardingPlan
from resharding.simulator import Simulation
from resharding.slices import Box, all_tiles, hosts_of
from resharding.traffic import edges

# Okabe and Ito's palette, told apart by colour-blind readers as well; one colour per sending host
# or, with one sending host, per sending device.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
_SEVERAL = "#bbbbbb"
_MOST_LABELS = 60  # bars that carry the number of the receiver or sender
_MOST_APART = 4  # bars side by side that have a white edge, which is all that is left of thin ones
_MOST_INCHES = 60.0  # of rows: 8,000 pixels, which other programs open
_MOST_NAMED = 400  # rows with a name


def draw(made: ReshardingPlan, course: Simulation, path: Path) -> None:
    """Write a PNG: a row per device, bars above its line leave it, bars below arrive at it.

    A bar has the colour of the host the bytes come from at first, grey if of several, and says the
    device at the other end. What goes on at once stands side by side.
    """
    host_of = hosts_of(made.task)
    devices = sorted(host_of, key=lambda device: (host_of[device], device))
    row = {device: k for k, device in enumerate(devices)}
    owners = sorted({host_of[device] for device in made.task.source.devices})
    by_host = len(owners) > 1
    if not by_host:
        owners = sorted(made.task.source.devices)
    colour = {owner: _COLOURS[k % len(_COLOURS)] for k, owner in enumerate(owners)}
    unit, scale = _unit(made.seconds)
    height = max(2.5, 1.4 + min(_MOST_INCHES, 0.32 * len(devices)))
    figure = Figure(figsize=(10, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    hops = [
        (number, pair) for number, transfer in enumerate(made.transfers) for pair in edges(transfer)
    ]
    origins = _origins(made, course)
    sides: dict[tuple[int, bool], list[tuple[float, float, int, int]]] = {}
    for number, (sender, receiver) in hops:
        span = course.intervals[number]
        sides.setdefault((sender, True), []).append((*span, number, receiver))
        sides.setdefault((receiver, False), []).append((*span, number, sender))
    bars: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}  # by colour, and if apart
    for (device, sends), spans in sides.items():
        lanes, count = _lanes(spans)
        each, first = 0.38 / count, row[device] + (-0.4 if sends else 0.02)
        for (begin, end, number, other), lane in zip(spans, lanes, strict=True):
            left, right, top = begin / scale, end / scale, first + lane * each
            origin = origins[number]
            if by_host:
                origin = {host_of[holder] for holder in origin}
            fill = colour[min(origin)] if len(origin) == 1 else _SEVERAL
            corners = [(left, top), (right, top), (right, top + each), (left, top + each)]
            bars.setdefault((fill, count <= _MOST_APART), []).append(corners)
            if len(hops) <= _MOST_LABELS and count == 1 and end - begin > 0.03 * made.seconds:
                axes.text(
                    (left + right) / 2,
                    top + each / 2,
                    f"{'to' if sends else 'from'} {host_of[other]}:{other % 100}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white",
                )
    for (fill, apart), several in bars.items():
        width = 0.6 if apart else 0.0
        axes.add_collection(
            PolyCollection(several, facecolor=fill, edgecolor="white", linewidth=width)
        )
    axes.axvline(made.lower_bound / scale, color="#222222", linestyle="--", linewidth=1)
    named = devices[:: -(-len(devices) // _MOST_NAMED)]
    axes.set_yticks([row[d] for d in named])
    axes.set_yticklabels([f"{host_of[d]}:{d % 100}" for d in named], fontsize=8)
    last = None
    for device in devices:
        if last is not None and host_of[device] != last:
            axes.axhline(row[device] - 0.5, color="#cccccc", linewidth=0.8)
        last = host_of[device]
    axes.set_ylim(len(devices) - 0.5, -0.5)
    axes.set_xlim(0, max(made.seconds, made.lower_bound) * 1.02 / scale or 1)
    axes.set_xlabel(f"time ({unit}); dashed: the lower bound")
    axes.set_ylabel("host:device (above its line: sends, below: takes in)", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    tensor, word = made.task.tensor, "host" if by_host else "device"
    axes.set_title(
        f"{tensor.dtype}{list(tensor.shape)}, {format_bytes(tensor.bytes)}, by {made.strategy}: "
        f"{format_seconds(made.seconds)}, bound {format_seconds(made.lower_bound)}",
        fontsize=10,
    )
    handles = [
        Patch(color=colour[o], label=f"from {word} {o if by_host else o % 100}") for o in owners[:8]
    ]
    if any(fill == _SEVERAL for fill, _ in bars):
        handles.append(Patch(color=_SEVERAL, label=f"from several {word}s"))
    figure.legend(
        handles=handles,
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, format="png")


def _origins(made: ReshardingPlan, course: Simulation) -> list[set[int]]:
    """Return, for each transfer, the devices of the source that what it moves comes from."""
    tiles = all_tiles(made.task.source, made.task.tensor.shape)
    arrived: dict[int, list[tuple[Box, set[int]]]] = {}
    origins: list[set[int]] = [set() for _ in made.transfers]
    for number in sorted(range(len(origins)), key=lambda k: (course.intervals[k], k)):
        transfer, found = made.transfers[number], origins[number]
        box = Box(transfer.start, transfer.stop)
        rings = transfer.method in ("gather", "reduce")
        for device in (transfer.sender, *transfer.receivers) if rings else (transfer.sender,):
            for part, owners in arrived.get(device, ()):
                if part.common(box) is not None:
                    found |= owners
            if device in tiles and tiles[device].contains(box):
                found.add(device)
        for receiver in transfer.receivers:
            arrived.setdefault(receiver, []).append((box, found))
    return origins


def _lanes(spans: Sequence[tuple[float, float, int, int]]) -> tuple[list[int], int]:
    """Return a lane for each span, which those have to themselves that follow each other, and how
    many there are."""
    ends: list[float] = []
    lanes = [0] * len(spans)
    for k in sorted(range(len(spans)), key=lambda k: spans[k][:2]):
        begin, end = spans[k][:2]
        free = [lane for lane, last in enumerate(ends) if last <= begin * (1 + 1e-9)]
        lanes[k] = free[0] if free else len(ends)
        ends[lanes[k] : lanes[k] + 1] = [end]
    return lanes, max(1, len(ends))


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return unit, scale
    return "µs", 1e-6
