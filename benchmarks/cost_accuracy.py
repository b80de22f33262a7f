"""Accuracy of the step-time and memory model on measured training runs.

    python benchmarks/cost_accuracy.py [--data FILE]... [--most-devices N] [--json OUT]
        [--extrapolate]

Reads the project's JSON and the tables of `cost_model.measured_table` (CSV). Prints per source:
rows, MAPE, bias, worst row, regret beside that of the rule of thumb (`cost_model.accuracy.
rule_of_thumb`), interval coverage, memory errors, failed runs foreseen and false alarms, and rows
that cannot be predicted with the reason, beside what other tools predicted. Nothing is fitted
unless `--extrapolate` asks for it. Rows of the project's own data are judged by constants fitted
without their group (4-fold cross-validation by group, fixed seed, see `cost_model.step_fit`); rows
of other groups by the shipped constants. Sources that were never fitted on are marked so.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict, evolve
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cost_model.accuracy import (
    PredictedRow,
    memory_rows,
    peak_rows,
    predict_rows,
    source_accuracy,
    unseen_model,
)
from cost_model.measured_row import MeasuredRun
from cost_model.measured_run import read_measured_runs
from cost_model.prediction import StepModel, step_model
from cost_model.step_fit import fit_model
from cost_model.step_terms import predict_terms
from cost_model.training_run import TrainingRun

# MAPE and mean regret of other tools on the same sources, as their publications give them
PUBLISHED = {
    "vtrain_multi": {"calculon": (0.129, 1.013)},
    "vtrain_single": {"calculon": (0.390, 1.100)},
}


FILES = (
    "training_runs.json", "ultrascale_h100.csv", "simumax_b200.csv", "sailor_runs.csv",
    "megatron_bridge.csv", "mpt_fsdp.csv",
)  # fmt: skip


def default_data() -> list[Path]:
    """Return where the project's data is: $ALPA_DATA, else beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("ALPA_DATA", beside)) / "measured"
    return [folder / name for name in FILES]


def analytic_mape(rows: list[PredictedRow]) -> float:
    """Return the MAPE of the analytic model alone, without the correction near measured cells."""
    errors = []
    for item in rows:
        constants = unseen_model(item.row).constants
        if item.row.run is not None and item.row.step_seconds:
            predicted = sum(predict_terms(item.row.run, constants).values())
            errors.append(abs(predicted / item.row.step_seconds - 1))
    return sum(errors) / len(errors)


def report(rows: tuple[MeasuredRun, ...], console: Console) -> dict[str, Any]:
    """Print the tables and return them as plain data."""
    predict_rows(rows)  # reads the constants, so that the time below is that of predicting
    started = time.perf_counter()
    predicted = predict_rows(rows)
    elapsed = time.perf_counter() - started
    fits = step_model()
    console.print(
        f"{len(rows)} rows, {len(predicted)} with a step time of a known configuration; "
        f"folds by group, seed {fits.whole.seed}; {elapsed / max(1, len(predicted)) * 1e6:.0f} us "
        "a prediction"
    )
    result: dict[str, Any] = {"rows": len(rows), "predicted": len(predicted), "sources": []}
    table = Table(
        "source", "rows", "groups", "MAPE", "analytic", "bias", "worst", "regret: mean, most",
        "rule of thumb", "80 % holds", "others: MAPE (ours there), regret",
        title="Step time, on rows not fitted on",
    )  # fmt: skip
    for entry in source_accuracy(predicted):
        mine = [item for item in predicted if item.row.source == entry.source]
        plain = analytic_mape(mine)
        others = [
            f"{tool} {theirs:.1%} ({ours:.1%})" for tool, (theirs, ours) in entry.others.items()
        ]
        published = PUBLISHED.get(entry.source, {})
        others += [f"{tool} {mape:.1%}, {regret:.3f}" for tool, (mape, regret) in published.items()]
        table.add_row(
            entry.source + ("" if entry.fitted else " (never fitted)"),
            str(entry.num_rows), str(len({item.row.group for item in mine})),
            f"{entry.mape:.1%}", f"{plain:.1%}", f"{entry.bias:+.1%}",
            f"{entry.worst:+.0%} {entry.worst_id}",
            f"{entry.regret:.3f}, {entry.worst_regret:.2f} of {entry.regret_groups}",
            f"{entry.rule_regret:.3f}, {entry.worst_rule_regret:.2f}", f"{entry.coverage:.0%}",
            "; ".join(others),
        )  # fmt: skip
        result["sources"].append(asdict(entry) | {"analytic_mape": plain, "published": published})
    console.print(table)
    covered = [item.covered for item in predicted]
    if covered:
        share = sum(covered) / len(covered)
        console.print(f"80 % intervals hold {share:.1%} of all {len(covered)} rows")
        result["coverage"] = share
    memory = memory_rows(rows)
    if memory:
        result["memory"] = _memory(memory, console)
    peaks = peak_rows(rows)
    if peaks:
        result["peaks"] = [asdict(entry) for entry in peaks]
        table = Table(
            "source", "rows", "MAPE", "bias", "worst", "failed", "flagged", "false alarms",
            title="Peak memory per device, on rows not fitted on",
        )  # fmt: skip
        for peak in peaks:
            table.add_row(
                peak.source, str(peak.num_rows), f"{peak.mape:.1%}", f"{peak.bias:+.1%}",
                f"{peak.worst:+.0%}", str(peak.failed),
                "" if peak.flagged is None else f"{peak.flagged:.1%}",
                "" if peak.false_alarms is None else f"{peak.false_alarms:.1%}",
            )  # fmt: skip
        console.print(table)
    skipped: dict[str, int] = {}
    for row in rows:
        if row.run is None:
            label = f"{row.source}: {row.skipped}"
            skipped[label] = skipped.get(label, 0) + 1
    for label, count in skipped.items():
        console.print(f"not predicted, {count} rows of {label}")
    result["skipped"] = skipped
    result["errors"] = {item.row.id: item.error for item in predicted}
    return result


def extrapolation(rows: tuple[MeasuredRun, ...], console: Console) -> dict[str, Any]:
    """Print how rows are predicted by constants that have seen nothing of their kind."""

    def single(test: Callable[[TrainingRun], bool]) -> Callable[[MeasuredRun], bool]:
        return lambda row: row.source == "vtrain_single" and row.run is not None and test(row.run)

    kinds: dict[str, Callable[[MeasuredRun], bool]] = {
        "one node, width 1024": single(lambda run: run.model.hidden == 1024),
        "one node, width 2048": single(lambda run: run.model.hidden == 2048),
        "one node, tensor 4": single(lambda run: run.tensor == 4),
        "one node, microbatch 8": single(lambda run: run.micro_batch == 8),
        "one node, all 8 devices": single(lambda run: run.cluster.num_devices == 8),
        "all many-node runs": lambda row: row.source == "vtrain_multi",
    }
    fitted = step_model().whole.sources
    usable = [row for row in rows if row.source in fitted and row.run and row.step_seconds]
    shipped = step_model().whole
    table = Table("left out", "rows", "MAPE", "bias", "regret", "80 % holds")
    result = {}
    for kind, chosen in track(kinds.items(), "refitting", console=console):
        left_out = [row for row in usable if chosen(row)]
        if not left_out or len(left_out) == len(usable):
            continue
        rest = [row for row in usable if not chosen(row)]
        model_of_rest = fit_model(rest, f"all but {kind}")
        model = StepModel(whole=evolve(model_of_rest, intervals=shipped.intervals))
        (entry,) = source_accuracy(predict_rows(left_out, model), model)
        table.add_row(
            kind, str(entry.num_rows), f"{entry.mape:.1%}", f"{entry.bias:+.1%}",
            f"{entry.regret:.3f}", f"{entry.coverage:.0%}",
        )  # fmt: skip
        result[kind] = asdict(entry)
    console.print(table)
    return result


def _memory(rows: Any, console: Console) -> dict[str, float]:
    table = Table("row", "state", "activations", "both", title="Memory per device, nothing fitted")
    for item in rows:
        table.add_row(
            item.row.id, f"{item.state_error:+.1%}", f"{item.activation_error:+.1%}",
            f"{item.total_error:+.1%}",
        )  # fmt: skip
    console.print(table)
    totals = [abs(item.total_error) for item in rows]
    return {"mape": sum(totals) / len(totals), "worst": max(totals)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, action="append", help="rows to judge; may be given several times"
    )
    parser.add_argument("--most-devices", type=int, default=None, help="leave larger runs out")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    parser.add_argument(
        "--extrapolate", action="store_true", help="refit without whole kinds of rows (a minute)"
    )
    options = parser.parse_args()
    paths = options.data or [path for path in default_data() if path.exists()]
    if not paths:
        parser.exit(0, f"no data in {default_data()[0].parent}; name a file with --data\n")
    rows = tuple(row for path in paths for row in read_measured_runs(path))
    if options.most_devices is not None:
        most = options.most_devices
        rows = tuple(r for r in rows if r.run is None or r.run.cluster.num_devices <= most)
    result = report(rows, Console(width=180))
    if options.extrapolate:
        result["extrapolation"] = extrapolation(rows, Console(width=180))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
