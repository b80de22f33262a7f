"""How good predictions of measured rows are: error, bias, regret and coverage by source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from cost_model.measured_row import MeasuredRun
from cost_model.prediction import (
    FittedModel,
    Prediction,
    StepModel,
    predict,
    step_model,
)
from cost_model.run_memory import run_memory
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
    worst_regret: float
    rule_regret: float  # the same of the rule of thumb (`rule_of_thumb`)
    worst_rule_regret: float
    regret_groups: int  # groups of at least two rows
    coverage: float  # share of rows inside the 80 % interval
    fitted: bool  # whether other groups of the source were fitted on
    others: Mapping[str, tuple[float, float]] = field(
        factory=dict
    )  # tool -> (MAPE, our MAPE there)


@frozen(kw_only=True)
class PeakMemory:
    """Accuracy of predicted memory over the rows of one source."""

    source: str
    num_rows: int  # that measured it
    mape: float
    bias: float
    worst: float
    failed: int  # rows that stopped, most likely out of memory
    flagged: float | None  # share of them predicted not to fit
    false_alarms: float | None  # share of the rows that ran predicted not to fit


def unseen_model(row: MeasuredRun, model: StepModel | None = None) -> FittedModel:
    """Return the constants for `row` that were fitted without its group."""
    if model is not None:
        return model.unseen(row.source, row.group)
    if row.run is None:
        raise ValueError(f"row {row.id} has no configuration")
    return step_model(row.run.executor).unseen(row.source, row.group)


def predict_rows(
    rows: Iterable[MeasuredRun], model: StepModel | None = None
) -> tuple[PredictedRow, ...]:
    """Return predictions for all rows with a configuration and a step time, out of fold."""
    return tuple(
        PredictedRow(row=row, prediction=predict(row.run, unseen_model(row, model)))
        for row in rows
        if row.run is not None and row.step_seconds is not None
    )


def source_accuracy(
    predicted: Sequence[PredictedRow], model: StepModel | None = None
) -> tuple[SourceAccuracy, ...]:
    """Return one report per source, in order of appearance."""
    reports = []
    for source in dict.fromkeys(item.row.source for item in predicted):
        items = [item for item in predicted if item.row.source == source]
        errors = [item.error for item in items]
        worst = max(items, key=lambda item: abs(item.error))
        regrets, rules = _regrets(items)
        reports.append(
            SourceAccuracy(
                source=source,
                num_rows=len(items),
                mape=sum(map(abs, errors)) / len(errors),
                bias=sum(errors) / len(errors),
                worst=worst.error,
                worst_id=worst.row.id,
                regret=sum(regrets) / len(regrets) if regrets else 1.0,
                worst_regret=max(regrets, default=1.0),
                rule_regret=sum(rules) / len(rules) if rules else 1.0,
                worst_rule_regret=max(rules, default=1.0),
                regret_groups=len(regrets),
                coverage=sum(item.covered for item in items) / len(items),
                fitted=any(source in unseen_model(item.row, model).sources for item in items),
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


def peak_rows(
    rows: Iterable[MeasuredRun], model: StepModel | None = None
) -> tuple[PeakMemory, ...]:
    """Return the accuracy of predicted memory by source, and whether failed runs were foreseen.

    Which runs are predicted to fail: `FittedModel.fails`.
    """
    by_source: dict[str, list[MeasuredRun]] = {}
    for row in rows:
        if row.run is not None and (row.peak_bytes is not None or row.failed):
            by_source.setdefault(row.source, []).append(row)
    found = []
    for source, mine in by_source.items():
        errors, flags = [], {True: [0, 0], False: [0, 0]}
        for row in mine:
            run = row.run
            if run is None:
                continue
            fitted = unseen_model(row, model)
            if row.peak_bytes is not None:
                needed = fitted.peak(run, row.measured_stage).total * fitted.memory_factor(run)
                errors.append(needed / row.peak_bytes - 1)
            flags[row.failed][0] += fitted.fails(run)
            flags[row.failed][1] += 1
        found.append(
            PeakMemory(
                source=source,
                num_rows=len(errors),
                mape=sum(map(abs, errors)) / max(1, len(errors)),
                bias=sum(errors) / max(1, len(errors)),
                worst=max(errors, key=abs, default=0.0),
                failed=flags[True][1],
                flagged=flags[True][0] / flags[True][1] if flags[True][1] else None,
                false_alarms=flags[False][0] / flags[False][1] if flags[False][1] else None,
            )
        )
    return tuple(found)


def rule_of_thumb(rows: Sequence[MeasuredRun]) -> MeasuredRun:
    """Return the row that practice would choose without a model.

    At most 64 replicas, then the least tensor x pipeline with tensor parallelism inside 8 devices,
    then the largest microbatch.
    """

    def rank(row: MeasuredRun) -> tuple[bool, bool, int, int]:
        run = row.run
        if run is None:
            raise ValueError(f"row {row.id} has no configuration")
        return run.data > 64, run.tensor > 8, run.tensor * run.pipeline, -run.micro_batch

    return min(rows, key=rank)


def _regrets(items: Sequence[PredictedRow]) -> tuple[list[float], list[float]]:
    """Return by group the regret of the prediction's choice and of the rule of thumb's."""
    groups: dict[str, list[PredictedRow]] = {}
    for item in items:
        groups.setdefault(item.row.group, []).append(item)
    regrets, rules = [], []
    for members in groups.values():
        if len(_configurations(members)) < 2:
            continue
        chosen = min(members, key=lambda item: item.prediction.step_seconds)
        best = min(item.row.step_seconds or 0.0 for item in members)
        regrets.append((chosen.row.step_seconds or 0.0) / best)
        rules.append((rule_of_thumb([item.row for item in members]).step_seconds or 0.0) / best)
    return regrets, rules


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
