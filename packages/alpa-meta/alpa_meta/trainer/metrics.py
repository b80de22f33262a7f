"""The metrics of a run: one JSON object per line and step in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from attrs import asdict, frozen


@frozen(kw_only=True)
class StepMetrics:
    """What one training step showed. `loss` is in nats per byte; times are in seconds."""

    step: int  # 1 is the first
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    tokens_per_second: float


class MetricsFile:
    """Appends one line per step to a file, each line whole."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a")

    def append(self, metrics: StepMetrics) -> None:
        """Write one line and hand it to the system."""
        self._stream.write(_line(metrics))
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the steps in a metrics file; a last line cut short by a crash is left out."""
    steps = []
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(StepMetrics(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: is not a line of metrics: {error}") from None
    return steps


def write_metrics(path: Path, steps: Iterable[StepMetrics]) -> None:
    """Replace the file by `steps`, at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(map(_line, steps)))
    os.replace(partial, path)


def _line(metrics: StepMetrics) -> str:
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(metrics).items()
    }
    return json.dumps(values) + "\n"
