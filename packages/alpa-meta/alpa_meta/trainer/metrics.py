"""The metrics of a run: one JSON object per line and step in `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from attrs import asdict, field, frozen

from alpa_meta.types import Function


class Metrics(Protocol):
    """What one training step showed, as a line of a file."""

    @property
    def step(self) -> int: ...

    def row(self) -> Mapping[str, float]: ...


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
    parts: Mapping[str, float] = field(factory=dict)  # seconds of the step, where it was traced

    def row(self) -> Mapping[str, float]:
        """Return the line's names and values."""
        row = asdict(self)
        return {**{k: v for k, v in row.items() if k != "parts"}, **_parts_row(self.parts)}

    @property
    def values(self) -> dict[str, float]:
        """What the step showed, beside its number and time."""
        names = ("loss", "gradient_norm", "learning_rate", "tokens_per_second")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, *, step: int, **row: float) -> StepMetrics:
        """Return what such a line says."""
        parts = _parts_of(row)
        return cls(step=step, **row, parts=parts)


_OF_STEP = ("step", "step_seconds")
_PART_NAMES = ("compute", "update", "transfer", "bubble")


def _parts_row(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_seconds": seconds for name, seconds in parts.items()}


def _parts_of(row: dict[str, float]) -> dict[str, float]:
    """Take the parts of a step out of a line."""
    names = [name for name in _PART_NAMES if f"{name}_seconds" in row]
    return {name: row.pop(f"{name}_seconds") for name in names}


@frozen(kw_only=True)
class OwnMetrics:
    """What one step of a user's program showed: the numbers that it returned, by their path."""

    step: int  # 1 is the first
    step_seconds: float
    values: Mapping[str, float]
    parts: Mapping[str, float] = field(factory=dict)  # seconds of the step, where it was traced

    @property
    def loss(self) -> float | None:
        """The value called loss, or the only one; None if that cannot be told."""
        if len(self.values) == 1:
            return next(iter(self.values.values()))
        return self.values.get("loss")

    def row(self) -> Mapping[str, float]:
        """Return the line's names and values."""
        timed = {"step_seconds": self.step_seconds, **_parts_row(self.parts)}
        return {"step": self.step, **self.values, **timed}

    @classmethod
    def of(cls, *, step: int, step_seconds: float, **values: float) -> OwnMetrics:
        """Return what such a line says."""
        parts = _parts_of(values)
        return cls(step=step, step_seconds=step_seconds, values=values, parts=parts)

    @staticmethod
    def named(values: Mapping[str, float]) -> dict[str, float]:
        """Return values under names that are none of the line's own."""
        own = (*_OF_STEP, *(f"{name}_seconds" for name in _PART_NAMES))
        return {f"returned.{k}" if k in own else k: v for k, v in values.items()}


class MetricsFile:
    """Appends one line per step to a file, each line whole."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a", encoding="utf-8")

    def append(self, metrics: Metrics) -> None:
        """Write one line and hand it to the system."""
        self._stream.write(_line(metrics))
        self._stream.flush()

    def close(self) -> None:
        """Close the file; what a full disk did not take is left out."""
        with contextlib.suppress(OSError):
            self._stream.close()


def read_metrics(
    path: Path, of: Function[M], say: Callable[[str], None] = lambda message: None
) -> list[M]:
    """Return the steps in a metrics file, made of their lines by `of`. Lines that are none are left
    out and said; of a last one that a crash cut short there is nothing to say."""
    steps, damaged = [], []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            steps.append(of(**json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            if number < len(lines):
                damaged.append(f"line {number} is no line of metrics: {error}")
    if damaged:
        more = f", nor are {len(damaged) - 1} others" if len(damaged) > 1 else ""
        say(f"warning: {path}: {damaged[0]}{more}; left out")
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
