"""The picture of a training run: loss by step, with the baseline and the held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from alpa_meta.report.style import INK, figure_file, plain

SMOOTHED_STEPS = 20


class Step(Protocol):
    """A step with its loss."""

    @property
    def step(self) -> int: ...

    @property
    def loss(self) -> float | None: ...


def draw_loss(
    path: Path,
    steps: Sequence[Step],
    *,
    unit: str = "nats per byte",
    trigram: float | None = None,
    held_out: float | None = None,
) -> None:
    """Write the training loss by step as a PNG picture at `path`; `unit` is the loss's, if it has
    one."""
    with figure_file(path, 7.5, 4.0) as figure:
        axes = plain(figure.subplots())
        at = np.array([step.step for step in steps])
        loss = np.array([step.loss for step in steps])
        axes.plot(at, loss, color="#9ecae1", linewidth=0.8, label="training, each step")
        if len(loss) >= SMOOTHED_STEPS:
            smooth = np.convolve(loss, np.full(SMOOTHED_STEPS, 1 / SMOOTHED_STEPS), mode="valid")
            # Drawn in the middle of its steps: at their end it would lie above a falling curve.
            middle = at[: len(smooth)] + (at[SMOOTHED_STEPS - 1 :] - at[: len(smooth)]) / 2
            axes.plot(
                middle,
                smooth,
                color="#0072b2",
                linewidth=1.6,
                label=f"training, mean of {SMOOTHED_STEPS} steps around",
            )
        if trigram is not None:
            axes.axhline(
                trigram,
                color="#d55e00",
                linestyle="--",
                linewidth=1.2,
                label=f"byte trigram, held-out: {trigram:.3f}",
            )
        if held_out is not None:
            axes.plot(
                at[-1:],
                [held_out],
                marker="D",
                linestyle="none",
                color="#009e73",
                label=f"held-out after step {at[-1]}: {held_out:.3f}",
                zorder=5,
                clip_on=False,
            )
        axes.set_xlabel("step", color=INK, fontsize=9)
        axes.set_ylabel(f"loss, {unit}" if unit else "loss", color=INK, fontsize=9)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
