"""How good predictions of measured rows are: error, bias, regret and coverage by source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from cost_model.measured_run import MeasuredRun
from cost_model.prediction import Prediction, StepModel, predict, run_memory, step_model
from cost_model.training_run import TrainingRun


@frozen(kw_only=True)
class PredictedRow:
    """One measured row and what was predicted for it by constants that have not seen its group."""

    row: MeasuredRun
    prediction: Prediction

    @property
    def error(self) -> float:
        """Return predicted over measured step time, less one."""
        if self.row.step_seconds is None:
            return 0.0
        return self.prediction.step_seconds / self.row.step_seconds - 1

    @property
    def covered(self) -> bool:
        """Return whether the measurement lies in the predicted interval."""
        measured = self.row.step_seconds or 0.0
        return self.prediction.low_seconds <= measured <= self.prediction.high_seconds


@frozen(kw_only=True)
class MemoryRow:
    """Measured and predicted memory of one row: relative errors of its parts and their sum."""

    row: MeasuredRun
    state_error: float
    activation_error: float
    total_error: float


@frozen(kw_only=True)
class SourceAccuracy:
    """Step-time accuracy over the rows of one source; errors are predicted / measured - 1."""

    source: str
    num_rows: int
    mape: float
    bias: float
    worst: float
    worst_id: str
    regret: float  # mean over groups: time of the row predicted fastest over the fastest
    regret_groups: int  # groups of at least two rows
    coverage: float  # share of rows inside the 80 % interval
    fitted: bool  # whether other groups of the source were fitted on
    others: Mapping[str, tuple[float, float]] = field(
        factory=dict
    )  # tool -> (MAPE, our MAPE there)


def predict_rows(
    rows: Iterable[MeasuredRun], model: StepModel | None = None
) -> tuple[PredictedRow, ...]:
    """Return predictions for all rows with a configuration and a step time, out of fold."""
    fits = step_model() if model is None else model
    return tuple(
        PredictedRow(row=row, prediction=predict(row.run, fits.unseen(row.source, row.group)))
        for row in rows
        if row.run is not None and row.step_seconds is not None
    )


def source_accuracy(
    predicted: Sequence[PredictedRow], model: StepModel | None = None
) -> tuple[SourceAccuracy, ...]:
    """Return one report per source, in order of appearance."""
    fits = step_model() if model is None else model
    reports = []
    for source in dict.fromkeys(item.row.source for item in predicted):
        items = [item for item in predicted if item.row.source == source]
        errors = [item.error for item in items]
        worst = max(items, key=lambda item: abs(item.error))
        regrets = _regrets(items)
        reports.append(
            SourceAccuracy(
                source=source,
                num_rows=len(items),
                mape=sum(map(abs, errors)) / len(errors),
                bias=sum(errors) / len(errors),
                worst=worst.error,
                worst_id=worst.row.id,
                regret=sum(regrets) / len(regrets) if regrets else 1.0,
                regret_groups=len(regrets),
                coverage=sum(item.covered for item in items) / len(items),
                fitted=source in fits.whole.sources,
                others=_others(items),
            )
        )
    return tuple(reports)


def memory_rows(rows: Iterable[MeasuredRun]) -> tuple[MemoryRow, ...]:
    """Return the memory errors of all rows that measured memory. Nothing of it is fitted."""
    found = []
    for row in rows:
        if row.run is None or row.state_bytes is None or row.activation_bytes is None:
            continue
        memory = run_memory(row.run)
        total = row.state_bytes + row.activation_bytes
        found.append(
            MemoryRow(
                row=row,
                state_error=memory.state / row.state_bytes - 1,
                activation_error=memory.activations / row.activation_bytes - 1,
                total_error=(memory.state + memory.activations) / total - 1,
            )
        )
    return tuple(found)


def _regrets(items: Sequence[PredictedRow]) -> list[float]:
    groups: dict[str, list[PredictedRow]] = {}
    for item in items:
        groups.setdefault(item.row.group, []).append(item)
    regrets = []
    for members in groups.values():
        if len(_configurations(members)) < 2:
            continue
        chosen = min(members, key=lambda item: item.prediction.step_seconds)
        best = min(item.row.step_seconds or 0.0 for item in members)
        regrets.append((chosen.row.step_seconds or 0.0) / best)
    return regrets


def _configurations(items: Iterable[PredictedRow]) -> set[TrainingRun]:
    return {item.row.run for item in items if item.row.run is not None}


def _others(items: Sequence[PredictedRow]) -> dict[str, tuple[float, float]]:
    found = {}
    for tool in dict.fromkeys(name for item in items for name in item.row.others):
        shared = [item for item in items if tool in item.row.others]
        theirs = [
            abs(item.row.others[tool] / item.row.step_seconds - 1)
            for item in shared
            if item.row.step_seconds
        ]
        ours = [abs(item.error) for item in shared]
        found[tool] = (sum(theirs) / len(theirs), sum(ours) / len(ours))
    return found
