"""The metrics of a run: one JSON object per line and step in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from attrs import asdict, frozen


class Metrics(Protocol):
    """What one training step showed, as a line of a file."""

    @property
    def step(self) -> int: ...

    def row(self) -> Mapping[str, Any]: ...


M = TypeVar("M", bound=Metrics)


@frozen(kw_only=True)
class StepMetrics:
    """What one training step showed. `loss` is in nats per byte; times are in seconds."""

    step: int  # 1 is the first
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    tokens_per_second: float

    def row(self) -> Mapping[str, Any]:
        """Return the line's names and values."""
        return asdict(self)


_OF_STEP = ("step", "step_seconds")


@frozen(kw_only=True)
class OwnMetrics:
    """What one step of a user's program showed: the numbers that it returned, by their path."""

    step: int  # 1 is the first
    step_seconds: float
    values: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """The value called loss, or the only one; None if that cannot be told."""
        if len(self.values) == 1:
            return next(iter(self.values.values()))
        return self.values.get("loss")

    def row(self) -> Mapping[str, Any]:
        """Return the line's names and values."""
        return {"step": self.step, **self.values, "step_seconds": self.step_seconds}

    @classmethod
    def of(cls, *, step: int, step_seconds: float, **values: float) -> OwnMetrics:
        """Return what such a line says."""
        return cls(step=step, step_seconds=step_seconds, values=values)

    @staticmethod
    def named(values: Mapping[str, float]) -> dict[str, float]:
        """Return values under names that are none of the line's own."""
        return {f"returned.{k}" if k in _OF_STEP else k: v for k, v in values.items()}


class MetricsFile:
    """Appends one line per step to a file, each line whole."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a")

    def append(self, metrics: Metrics) -> None:
        """Write one line and hand it to the system."""
        self._stream.write(_line(metrics))
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(path: Path, of: Callable[..., M]) -> list[M]:
    """Return the steps in a metrics file, made of their lines by `of`; a last line cut short by a
    crash is left out."""
    steps = []
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(of(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: is not a line of metrics: {error}") from None
    return steps


def write_metrics(path: Path, steps: Iterable[Metrics]) -> None:
    """Replace the file by `steps`, at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(map(_line, steps)))
    os.replace(partial, path)


def _line(metrics: Metrics) -> str:
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.row().items()
    }
    return json.dumps(values) + "\n"
