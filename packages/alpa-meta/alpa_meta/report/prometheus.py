"""The newest step of a run in Prometheus' text format: for its collectors, and `alpa top`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

_LINE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)", re.DOTALL)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', re.DOTALL)

HELP: Mapping[str, str] = {
    "alpa_step": "The number of the last step.",
    "alpa_step_seconds": "How long the last step took.",
    "alpa_predicted_step_seconds": "How long the plan says that a step takes.",
    "alpa_value": "A number that the last step returned, by its name.",
    "alpa_mesh_seconds": "What a mesh spent the last step on: compute, update, transfer, bubble.",
    "alpa_mesh_slow": "How many times slower than before a mesh is, if it is.",
    "alpa_planned_bytes": "The memory per device of a stage, as planned.",
    "alpa_recoveries_total": "How often workers were replaced.",
    "alpa_ended": "1 once the run does no more steps.",
}


@frozen
class Sample:
    """One number, with its labels."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Replace the file by samples, at once."""
    lines, last = [], ""
    for one in samples:
        if one.name != last:
            kind = "counter" if one.name.endswith("_total") else "gauge"
            lines += [f"# HELP {one.name} {HELP[one.name]}", f"# TYPE {one.name} {kind}"]
            last = one.name
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in one.labels.items())
        lines.append(
            f"{one.name}{{{labels}}} {one.value!r}" if labels else f"{one.name} {one.value!r}"
        )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file that `write_samples` wrote; ValueError for another."""
    found = []
    text = path.read_bytes().decode(errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):  # labels may hold other line ends
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None:
            raise ValueError(f"{path}, line {number}: is no line of Prometheus' text format")
        labels = {name: _plain(text) for name, text in _LABEL.findall(match[2] or "")}
        found.append(Sample(match[1], value, labels))
    return found


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _plain(value: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)
