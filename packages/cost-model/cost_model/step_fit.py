"""Fits the constants of the step model to measured training runs.

    python -m cost_model.step_fit TRAINING_RUNS.json [OUT]

Rows are split by group (equal model, devices and batch) into FOLDS parts: within each source the
groups are ordered by a hash with a fixed seed and cut into equal parts. Every row is predicted by
the constants fitted on the other parts (cross-validation), and its interval is set so that it holds
80 % of the out-of-fold rows of the other parts. The file that is written holds the constants
fitted on all rows for use on new ones, and the constants of every fold, so that reports never judge
a row by a fit that has seen it.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import asdict, evolve

from alpa_interchange.document import save
from cost_model.correction import Cell, Correction, features
from cost_model.least_squares import fit_parameters
from cost_model.measured_run import MeasuredRun, read_measured_runs
from cost_model.prediction import FittedModel, StepModel
from cost_model.training_run import StepConstants, predict_terms

SEED = 2026
FOLDS = 4
FITTED_SOURCES = ("vtrain_single", "vtrain_multi", "seqsel_tab5", "megatron_sc21")

# what a source weighs as a whole, whatever its number of rows
_WEIGHTS = {"vtrain_single": 2.0, "vtrain_multi": 1.5, "seqsel_tab5": 1.0, "megatron_sc21": 0.7}
# constants that no row of the fitted sources exercises keep their documented values
_FIXED = ("fused_attention_share", "context_exposed", "pipeline_bandwidth")
_BOUNDS = {
    "matmul_share": (0.4, 0.95), "attention_share": (0.05, 0.8), "memory_share": (0.4, 0.95),
    "tensor_bandwidth": (0.5, 1.15), "pipeline_exposed": (0.01, 1.0),
    "gradient_bandwidth": (0.3, 1.1), "gradient_exposed": (0.1, 1.0), "sharpness": (1.5, 16.0),
    "backward_memory": (1.0, 3.0), "unfused_memory": (1.0, 3.0), "launch_recompute": (0.1, 0.7),
}  # fmt: skip


def fold_of_groups(rows: Iterable[MeasuredRun], seed: int = SEED) -> dict[tuple[str, str], int]:
    """Return (source, group) -> fold number, from the names of the groups and the seed."""
    groups: dict[str, set[str]] = {}
    for row in rows:
        groups.setdefault(row.source, set()).add(row.group)
    folds = {}
    for source, names in groups.items():
        ordered = sorted(
            names, key=lambda name: hashlib.sha256(f"{seed}|{name}".encode()).hexdigest()
        )
        for rank, name in enumerate(ordered):
            folds[source, name] = rank * FOLDS // len(ordered)
    return folds


def fit_model(rows: Sequence[MeasuredRun], fitted_on: str) -> FittedModel:
    """Return the model fitted to `rows`, which all have a configuration and a step time."""
    runs = [row.run for row in rows if row.run is not None]
    measured = np.array([row.step_seconds for row in rows], dtype=float)
    counts = {source: sum(row.source == source for row in rows) for source in FITTED_SOURCES}
    weights = np.array([8 * _WEIGHTS[row.source] / math.sqrt(counts[row.source]) for row in rows])
    start = {name: value for name, value in asdict(StepConstants()).items() if name not in _FIXED}

    def predict(values: Mapping[str, float]) -> np.ndarray:
        constants = StepConstants(**values)
        return np.log([sum(predict_terms(run, constants).values()) for run in runs])

    values = fit_parameters(predict, measured, start, _BOUNDS, weights=weights)
    residuals = np.log(measured) - predict(values)
    return FittedModel(
        constants=StepConstants(**values),
        correction=Correction(cells=tuple(_cells(rows, residuals))),
        sources=FITTED_SOURCES,
        num_rows=len(rows),
        fitted_on=fitted_on,
        seed=SEED,
    )


def _cells(rows: Sequence[MeasuredRun], residuals: np.ndarray) -> Iterable[Cell]:
    gathered: dict[tuple[str, bool, tuple[float, ...]], list[float]] = {}
    for row, residual in zip(rows, residuals.tolist(), strict=True):
        if row.run is not None:
            group = row.run.cluster.host_groups[0]
            key = (group.device.name, group.num_hosts > 1, features(row.run))
            gathered.setdefault(key, []).append(residual)
    for (device, many_hosts, point), values in gathered.items():
        # the median ignores single runs that went wrong (a slow host, memory nearly full)
        yield Cell(
            device=device,
            features=point,
            residual=float(np.median(values)),
            count=len(values),
            many_hosts=many_hosts,
        )


def fit_all(rows: Sequence[MeasuredRun]) -> StepModel:
    """Return the constants of every fold and of all rows, with the interval set out of fold."""
    usable = [
        row
        for row in rows
        if row.source in FITTED_SOURCES and row.run is not None and row.step_seconds is not None
    ]
    folds = fold_of_groups(usable)
    models = []
    scores: list[tuple[int, bool, float]] = []  # fold, many hosts, error in standard deviations
    for fold in range(FOLDS):
        kept = [row for row in usable if folds[row.source, row.group] != fold]
        models.append(fit_model(kept, f"all folds but {fold}"))
        for row in usable:
            if folds[row.source, row.group] == fold and row.run is not None:
                many_hosts = row.run.cluster.host_groups[0].num_hosts > 1
                scores.append((fold, many_hosts, _score(row, models[fold])))
    return StepModel(
        whole=_with_intervals(fit_model(usable, "all rows"), scores),
        folds=tuple(
            _with_intervals(model, [score for score in scores if score[0] != fold])
            for fold, model in enumerate(models)
        ),
        fold_of_group={f"{source}|{group}": fold for (source, group), fold in folds.items()},
    )


def _with_intervals(model: FittedModel, scores: list[tuple[int, bool, float]]) -> FittedModel:
    """Return the model with intervals that hold 80 % of the rows behind `scores`."""

    def scale(many_hosts: bool) -> float:
        chosen = [score for _, many, score in scores if many == many_hosts]
        return float(np.quantile(chosen, 0.8)) if chosen else model.interval_scale

    return evolve(model, interval_scale=scale(False), interval_scale_hosts=scale(True))


def _score(row: MeasuredRun, model: FittedModel) -> float:
    """Return the row's error in predicted standard deviations."""
    if row.run is None or row.step_seconds is None:
        return 0.0
    mean, deviation = model.correction.at(row.run)
    predicted = sum(predict_terms(row.run, model.constants).values())
    error = abs(math.log(row.step_seconds / predicted) - mean)
    many_hosts = row.run.cluster.host_groups[0].num_hosts > 1
    return error / math.hypot(deviation, model.correction.scatter(many_hosts))


def main(arguments: list[str]) -> None:
    """Fit the rows of the file `arguments[0]` and write the constants to `arguments[1]`."""
    default = Path(__file__).parent / "data" / "step_model.json"
    model = fit_all(read_measured_runs(arguments[0]))
    save(model, Path(arguments[1]) if len(arguments) > 1 else default)
    print(f"{model.whole.num_rows} rows, {FOLDS} folds by group, seed {SEED}")
    print(
        f"80 % interval: {model.whole.interval_scale:.2f} standard deviations on one host, "
        f"{model.whole.interval_scale_hosts:.2f} on several"
    )
    for name, value in asdict(model.whole.constants).items():
        print(f"  {name:22} {value:.4g}")


if __name__ == "__main__":
    main(sys.argv[1:])
