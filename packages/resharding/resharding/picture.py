"""A drawing of a plan: what each device sends and takes in over time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from alpa_interchange.amounts import format_bytes, format_seconds
from alpa_interchange.reshard import ReshardingPlan
from resharding.simulator import Simulation
from resharding.slices import hosts_of
from resharding.traffic import edges

# Okabe and Ito's palette, told apart by colour-blind readers as well; one colour per sending host
# or, with one sending host, per sending device.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
_MOST_LABELS = 60  # bars that carry the number of the receiver or sender


def draw(made: ReshardingPlan, course: Simulation, path: Path) -> None:
    """Write a PNG: a row per device, bars above its line leave it, bars below arrive at it.

    A bar has the colour of the host the bytes come from, and says the device at the other end.
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
    height = max(2.5, 1.4 + 0.32 * len(devices))
    figure = Figure(figsize=(10, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    hops = [
        (number, pair) for number, transfer in enumerate(made.transfers) for pair in edges(transfer)
    ]
    for number, (sender, receiver) in hops:
        transfer, (begin, end) = made.transfers[number], course.intervals[number]
        owner = host_of[transfer.sender] if by_host else transfer.sender
        fill = colour.get(owner, "#bbbbbb")
        for device, other, top in ((sender, receiver, -0.4), (receiver, sender, 0.02)):
            axes.broken_barh(
                [(begin / scale, (end - begin) / scale)],
                (row[device] + top, 0.38),
                facecolor=fill,
                edgecolor="white",
                linewidth=0.6,
            )
            if len(hops) <= _MOST_LABELS and end - begin > 0.03 * made.seconds:
                axes.text(
                    (begin + end) / 2 / scale,
                    row[device] + top + 0.19,
                    f"{'to' if device == sender else 'from'} {host_of[other]}:{other % 100}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white",
                )
    axes.axvline(made.lower_bound / scale, color="#222222", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(devices)))
    axes.set_yticklabels([f"{host_of[d]}:{d % 100}" for d in devices], fontsize=8)
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
    figure.legend(
        handles=[
            Patch(color=colour[o], label=f"from {word} {o if by_host else o % 100}")
            for o in owners[:8]
        ],
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, format="png")


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return unit, scale
    return "µs", 1e-6
