"""How every figure looks: colours by phase, fonts, and writing to a file at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers as well.
PHASE_COLOURS = {
    "start": "#999999",
    "statistics": "#f0e442",
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "backward_input": "#e69f00",
    "backward_weight": "#d55e00",
    "forward + backward": "#56b4e9",  # never beside "forward": a step without a pipeline
    "update": "#009e73",
    "send": "#cc79a7",
    "receive": "#0072b2",
}
PHASE_LABELS = {  # of the kinds whose label in a legend is not their name
    "start": "before the microbatches",
    "backward_input": "backward of inputs",
    "backward_weight": "backward of weights",
}
SERIES_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
# What a mesh spends a step on, and what a device holds: the same in every figure.
TIME_COLOURS = {
    "compute": "#0072b2",
    "update": "#009e73",
    "collectives": "#cc79a7",
    "transfers": "#d55e00",
    "bubble": "#cccccc",
}
MEMORY_COLOURS = {
    "state": "#0072b2",
    "gradients": "#d55e00",
    "activations": "#009e73",
    "temporaries": "#cc79a7",
}
INK = "#222222"
CHARACTER = 0.056  # inches that a character of 7 points is wide, on average


def stage_colour(stage: int) -> str:
    """Return the colour of a stage; beside one another they differ."""
    return SERIES_COLOURS[stage % len(SERIES_COLOURS)]


def cut_text(text: str, most: int) -> str:
    """Return text of at most so many characters, with an ellipsis where it was longer."""
    return text if len(text) <= most else text[: max(most - 1, 1)] + "…"


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of `width` x `height` inches, written to `path` when the block ends."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)


def plain(axes: Axes) -> Axes:
    """Return `axes` without the frame lines that carry nothing."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    return axes
