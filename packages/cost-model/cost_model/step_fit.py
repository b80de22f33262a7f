"""Fits the constants of the step model to measured training runs.

    python -m cost_model.step_fit FILE... [--out FOLDER]

Every executor has constants of its own, fitted to the rows that ran under it. Rows are split by
group (equal model, devices and batch) into FOLDS parts: within each source the groups are ordered
by a hash with a fixed seed and cut into equal parts. Every row is predicted by the constants fitted
on the other parts (cross-validation), and its interval is set so that it holds 80 % of the
out-of-fold rows of the other parts. The files that are written hold the constants fitted on all
rows for use on new ones, and the constants of every fold, so that reports never judge a row by a
fit that has seen it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import asdict, evolve, frozen
from scipy.stats import norm, t

from alpa_interchange.document import save
from cost_model.correction import Cell, Correction, features
from cost_model.executor import EXECUTORS
from cost_model.layer_fit import fit_layers
from cost_model.least_squares import fit_parameters
from cost_model.measured_row import MeasuredRun
from cost_model.measured_run import read_measured_runs
from cost_model.prediction import (
    DEFAULT_EXECUTOR,
    NEARLY_FULL,
    FittedModel,
    StepModel,
    model_file,
    run_kind,
)
from cost_model.run_memory import MemoryConstants, fit_probability, peak_memory
from cost_model.step_constants import StepConstants
from cost_model.step_terms import device_lead, predict_terms, stall_seconds, stalls
from cost_model.training_run import TrainingRun, start_problem

SEED = 2026
_ITERATIONS = 14  # later ones change no source's error by 0.1 points
FOLDS = 4
FALSE_ALARMS = 0.02  # share of the runs that run which may be predicted to fail
_FEWEST = 3  # rows that a median is taken of
LARGEST = 256  # devices: the published runs on 512 H100 are slow throughout, for no stated reason

# what a source weighs as a whole, whatever its number of rows
FITTED_SOURCES: Mapping[str, float] = {
    "vtrain_single": 2.0, "vtrain_multi": 1.5, "seqsel_tab5": 1.0, "megatron_sc21": 0.7,
    "ultrascale": 2.0, "simumax": 1.0, "sailor": 1.0, "megatron_bridge": 1.0, "mpt_fsdp": 1.0,
}  # fmt: skip
# constants that no row of the executor exercises stay at their start, by the prior
_BOUNDS = {
    "matmul_share": (0.3, 1.0), "attention_share": (0.05, 0.8), "memory_share": (0.4, 1.0),
    "fused_attention_share": (0.1, 0.9), "tensor_bandwidth": (0.2, 3.0),
    "pipeline_exposed": (0.01, 1.0), "pipeline_bandwidth": (0.05, 1.0),
    "gradient_bandwidth": (0.2, 1.1), "gradient_exposed": (0.02, 1.0), "sharpness": (1.5, 16.0),
    "backward_memory": (1.0, 3.0), "unfused_memory": (1.0, 3.0), "launch_recompute": (0.1, 0.7),
    "context_exposed": (0.05, 1.0), "fabric_bandwidth": (0.1, 1.2), "head": (0.3, 3.0),
    "loss": (0.5, 5.0), "fused_experts": (0.4, 1.0),
    "optimizer_bytes": (15.0, 400.0), "tensor_exposed": (0.02, 1.0), "fabric_tensor": (0.1, 1.2),
    "grouped_share": (0.1, 1.2), "sharded_exposed": (0.1, 5.0), "expert_exposed": (0.02, 4.0),
}  # fmt: skip
# narrower where the program is known: kernels beside DDP's collectives are slowed 1.13 to 1.3 times
# (Galvatron), and reducing the last bucket of 25 MB is all that is left after them
_NARROWER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "nanotron": {"gradient_exposed": (0.02, 0.2)},
}
# where the search starts, if not at the defaults: nanotron launches each collective from Python
_STARTS: Mapping[str, Mapping[str, float]] = {
    # tensor parallelism over hosts, which one group of Megatron's rows has: what nanotron (0.36)
    # and Sailor (0.39) reach of the fabric
    DEFAULT_EXECUTOR: {"fabric_tensor": 0.4},
    # grouped products as SimuMax measured them; the embedding as nanotron's on H100, by bandwidth:
    # at the default it takes as long as three layers, and the fit halves the output matrix for it
    "megatron": {"grouped_rows": 300.0, "embedding": 7e-11},
    "nanotron": {
        "launch": 4e-3, "launch_staged": 2.5e-3, "pipeline_latency": 1e-3, "fabric_latency": 30.0,
        "stall": 0.5, "step_layer": 3e-4, "sharded_calls": 9.0,
    },
}  # fmt: skip
# of memory: nanotron holds half-precision gradients beside those it accumulates
_MEMORY_STARTS: Mapping[str, Mapping[str, float]] = {"nanotron": {"extra": 2.0}}
# Megatron's constants are fitted as they were before the others came: some stay as documented
_FIXED: Mapping[str, tuple[str, ...]] = {
    DEFAULT_EXECUTOR: (
        "fused_attention_share", "context_exposed", "pipeline_bandwidth", "fabric_bandwidth",
        "fabric_latency", "fabric_tensor", "launch_staged", "loss", "expert_exposed",
        "grouped_share", "scaling",
    ),
}  # fmt: skip


@frozen(kw_only=True)
class _Score:
    """An out-of-fold error of one row."""

    fold: int
    group: str
    kind: str
    deviations: float  # log(measured / predicted) in predicted standard deviations
    memory: float | None  # log(measured / predicted) of its memory
    room: float  # `FittedModel.room`; none where the run has a start problem


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
    """Return the model fitted to `rows` of one executor; all have a configuration and a time."""
    everything, rows = rows, [row for row in rows if not _nearly_full(row)]
    runs = [row.run for row in rows if row.run is not None]
    executor = runs[0].program.fitted_as
    measured = np.array([row.step_seconds for row in rows], dtype=float)
    sources = tuple(dict.fromkeys(row.source for row in rows))
    counts = {source: sum(row.source == source for row in rows) for source in sources}
    weights = np.array(
        [8 * FITTED_SOURCES[row.source] / math.sqrt(counts[row.source]) for row in rows]
    )
    fixed = _FIXED.get(executor, ())
    first = asdict(StepConstants()) | dict(_STARTS.get(executor, {}))
    if EXECUTORS[executor].profiled:  # runs whose layers are looked up leave their constants alone
        devices = {group.device.name for run in runs for group in run.cluster.host_groups}
        first |= fit_layers(executor, devices, first, _BOUNDS)

    def predict(values: Mapping[str, float]) -> np.ndarray:
        constants = StepConstants(**(first | dict(values)))
        return _nearest_log_seconds(runs, constants, measured)

    same = predict({})
    start = {
        name: value
        for name, value in first.items()
        if name not in fixed and not np.array_equal(predict({name: 0.9 * value}), same)
    }
    values = first | fit_parameters(
        predict,
        measured,
        start,
        _BOUNDS | dict(_NARROWER.get(executor, {})),
        weights=weights,
        iterations=_ITERATIONS,
    )
    residuals = np.log(measured) - predict(values)
    constants = evolve(
        StepConstants(**values), reclaim=_reclaim(everything, StepConstants(**values))
    )
    memory, memory_correction = fit_memory(everything, constants)
    return FittedModel(
        constants=constants,
        correction=_correction(runs, residuals, executor),
        memory=memory,
        memory_correction=memory_correction,
        sources=sources,
        num_rows=len(everything),
        fitted_on=fitted_on,
        seed=SEED,
    )


def _nearly_full(row: MeasuredRun) -> bool:
    """Return whether a run's memory was so full that its allocator had to give blocks back."""
    if row.run is None or row.peak_bytes is None or not row.run.program.overlapped_tensor:
        return False
    return row.peak_bytes > NEARLY_FULL * row.run.cluster.host_groups[0].device.memory


def _nearest_log_seconds(
    runs: Sequence[TrainingRun], constants: StepConstants, measured: np.ndarray
) -> np.ndarray:
    """Return [runs] predicted log seconds, with or without a stall, whichever is nearer.

    Of nanotron's runs over several hosts about a quarter stalled, for a reason that no row states:
    a fit to the mean of both would describe neither.
    """
    plain = [sum(predict_terms(run, constants).values()) for run in runs]
    stalled = [
        one + (0.0 if stalls(run) else stall_seconds(run, constants))
        for one, run in zip(plain, runs, strict=True)
    ]
    both: np.ndarray = np.log([plain, stalled])
    nearest = np.argmin(np.abs(both - np.log(measured)), axis=0)
    found: np.ndarray = np.take_along_axis(both, nearest[None], axis=0)[0]
    return found


def fit_memory(
    rows: Sequence[MeasuredRun], constants: StepConstants
) -> tuple[MemoryConstants, Correction]:
    """Return the memory constants fitted to the rows that measured it, and what they leave.

    How far the host runs ahead of the device follows from the `constants` of time.
    """
    known = [row for row in rows if row.run is not None and row.peak_bytes is not None]
    if len(known) < 5:
        return MemoryConstants(), Correction()
    measured = np.array([row.peak_bytes for row in known], dtype=float)

    runs = [row.run for row in known if row.run is not None]
    leads = [device_lead(run, constants) for run in runs]

    def predict(values: Mapping[str, float]) -> np.ndarray:
        memory = MemoryConstants(**values)
        pairs = zip(known, leads, strict=True)
        return np.log([_memory(row, memory, lead) for row, lead in pairs])

    start = asdict(MemoryConstants()) | dict(_MEMORY_STARTS.get(runs[0].program.fitted_as, {}))
    values = fit_parameters(
        predict, measured, start, {"slack": (0.9, 2.0)},
        weights=np.full(len(known), 16 / math.sqrt(len(known))), delta=0.05, iterations=30,
    )  # fmt: skip
    return MemoryConstants(**values), _correction(runs, np.log(measured) - predict(values), "")


def _memory(row: MeasuredRun, constants: MemoryConstants, lead: float) -> float:
    if row.run is None:
        return 1.0
    return peak_memory(row.run, constants, row.measured_stage, lead).total


def _reclaim(rows: Sequence[MeasuredRun], c: StepConstants) -> float:
    """Return the median seconds per microbatch that rows with nearly full memory took longer."""
    longer = [
        (row.step_seconds - sum(predict_terms(row.run, c).values())) / row.run.num_microbatches
        for row in rows
        if row.run is not None and row.step_seconds is not None and _nearly_full(row)
    ]
    return max(0.0, float(np.median(longer))) if len(longer) >= _FEWEST else 0.0


def _correction(runs: Sequence[TrainingRun], residuals: np.ndarray, executor: str) -> Correction:
    """Return the process over the residuals; its scale and noise follow from their spread."""
    cells: list[tuple[str, Cell]] = []
    spreads: list[float] = []
    gathered: dict[tuple[str, str, bool, tuple[float, ...]], list[float]] = {}
    for run, residual in zip(runs, residuals.tolist(), strict=True):
        group = run.cluster.host_groups[0]
        key = (run_kind(run), group.device.name, group.num_hosts > 1, features(run))
        gathered.setdefault(key, []).append(residual)
    for (kind, device, many_hosts, point), values in gathered.items():
        # the median ignores single runs that went wrong (a slow host, memory nearly full)
        middle = float(np.median(values))
        if len(values) > 1:
            spreads += [abs(value - middle) for value in values]
        cell = Cell(
            device=device,
            features=tuple(round(value, 4) for value in point),
            residual=round(middle, 5),
            count=len(values),
            many_hosts=many_hosts,
        )
        cells.append((kind, cell))
    if executor == DEFAULT_EXECUTOR:
        return Correction(cells=tuple(cell for _, cell in cells))
    noise = float(np.clip(_deviation(spreads), 0.02, 0.1)) if spreads else 0.05
    scale = float(np.clip(_deviation([abs(cell.residual) for _, cell in cells]), 0.04, 0.12))
    # runs far from all others of their kind stalled for a reason of their own: nothing follows
    kept = []
    for chosen in dict.fromkeys(kind for kind, _ in cells):
        mine = [cell for kind, cell in cells if kind == chosen]
        limit = max(0.15, 1.5 * _deviation([abs(cell.residual) for cell in mine]))
        kept += [cell for cell in mine if abs(cell.residual) < limit]
    return Correction(cells=tuple(kept), scale=scale, noise=noise, noise_hosts=noise)


def _deviation(errors: Sequence[float]) -> float:
    """Return the standard deviation of a normal distribution with the errors' median."""
    return 1.4826 * float(np.median(errors))


def fit_all(
    rows: Sequence[MeasuredRun], note: Callable[[str], None] = lambda _: None
) -> dict[str, StepModel]:
    """Return the fits of every executor, with the intervals set out of fold."""
    usable = [
        row
        for row in rows
        if row.source in FITTED_SOURCES
        and row.run is not None
        and row.step_seconds is not None
        and (row.source != "ultrascale" or row.run.cluster.num_devices <= LARGEST)
    ]
    executors = dict.fromkeys(row.run.program.fitted_as for row in usable if row.run is not None)
    found: dict[str, StepModel] = {}
    for executor in executors:
        mine = [row for row in usable if row.run and row.run.program.fitted_as == executor]
        note(f"{executor}: {len(mine)} rows")
        found[executor] = _fit_executor(mine)
    return found


def _fit_executor(usable: Sequence[MeasuredRun]) -> StepModel:
    folds = fold_of_groups(usable)
    models: list[FittedModel] = []
    scores: list[_Score] = []
    for fold in range(FOLDS):
        kept = [row for row in usable if folds[row.source, row.group] != fold]
        # a single group has no other rows to fit on: it is judged by constants not fitted at all
        models.append(
            fit_model(kept, f"all folds but {fold}")
            if kept
            else FittedModel(fitted_on="nothing: one group only")
        )
        for row in usable:
            if folds[row.source, row.group] == fold and row.run is not None:
                scores.append(_score(row, models[fold], fold))
    return StepModel(
        whole=_with_intervals(fit_model(usable, "all rows"), scores),
        folds=tuple(
            _with_intervals(model, [score for score in scores if score.fold != fold])
            for fold, model in enumerate(models)
        ),
        fold_of_group={f"{source}|{group}": fold for (source, group), fold in folds.items()},
    )


def _with_intervals(model: FittedModel, scores: list[_Score]) -> FittedModel:
    """Return the model with intervals that hold 80 % of the rows behind `scores`."""
    intervals = {}
    for kind in ("all", *dict.fromkeys(score.kind for score in scores)):
        found = _interval([score for score in scores if kind in ("all", score.kind)])
        if found is not None:
            intervals[kind] = found
    memory = [abs(score.memory) for score in scores if score.memory is not None]
    deviation = max(0.01, _deviation(memory)) if memory else model.memory_deviation
    rooms = sorted(score.room for score in scores if score.memory is not None)
    # with k of n runs that ran below, the next one is with odds of (k + 1) / (n + 2) (Laplace)
    allowed = math.floor(FALSE_ALARMS * (len(rooms) + 2)) - 1
    least = fit_probability(rooms[allowed], deviation) if allowed >= 0 else model.least_odds
    return evolve(model, intervals=intervals, memory_deviation=deviation, least_odds=least)


def _interval(scores: Sequence[_Score]) -> tuple[float, float] | None:
    """Return the 80 % interval of rows of new groups in predicted standard deviations.

    Rows of a group err together, so every group counts once, whatever its number of rows. A new
    group is beyond all of G with odds of 1 to G: the tails are those of G + 2 groups, two of them
    outside, times the ratio of Student's t with G - 1 degrees of freedom to the normal, as for a
    new draw after G. None where there are too few to have tails.
    """
    sizes = Counter(score.group for score in scores)
    groups = len(sizes)
    if len(scores) < 10 or groups < 3:
        return None
    ordered = sorted(scores, key=lambda score: score.deviations)
    weights = np.array([1 / sizes[score.group] for score in ordered])
    ranks = (np.cumsum(weights) - weights / 2) / weights.sum()
    tail = 0.1 * groups / (groups + 2)
    wider = t.ppf(0.9, groups - 1) / norm.ppf(0.9) * math.sqrt(1 + 1 / groups)
    values = [score.deviations for score in ordered]
    low, high = wider * np.interp([tail, 1 - tail], ranks, values)
    return min(float(low), -0.1), max(float(high), 0.1)


def _score(row: MeasuredRun, model: FittedModel, fold: int) -> _Score:
    """Return the row's error in predicted standard deviations."""
    run = row.run
    if run is None or row.step_seconds is None:
        raise ValueError(f"row {row.id} has no configuration or time")
    mean, deviation = model.correction.at(run)
    predicted = sum(predict_terms(run, model.constants).values())
    predicted += model.reclaiming(run) / math.exp(mean)
    many_hosts = run.cluster.host_groups[0].num_hosts > 1
    deviation = math.hypot(deviation, model.correction.scatter(many_hosts))
    memory = None
    if row.peak_bytes is not None:
        needed = model.peak(run, row.measured_stage).total * model.memory_factor(run)
        memory = math.log(row.peak_bytes / needed)
    return _Score(
        fold=fold,
        group=row.group,
        kind=run_kind(run),
        deviations=(math.log(row.step_seconds / predicted) - mean) / deviation,
        memory=memory,
        room=-math.inf if start_problem(run) else model.room(run),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="+", help="files of measured runs")
    default = Path(__file__).parent / "data"
    parser.add_argument("--out", type=Path, default=default, help="folder of the fits")
    options = parser.parse_args()
    rows = [row for path in options.data for row in read_measured_runs(path)]
    models = fit_all(rows, print)
    print(f"{FOLDS} folds by group, seed {SEED}")
    for executor, model in models.items():
        save(model, options.out / model_file(executor))
        print(f"{executor}: {model.whole.num_rows} rows of {', '.join(model.whole.sources)}")
        for name, value in asdict(model.whole.constants).items():
            print(f"  {name:22} {value:.4g}")


if __name__ == "__main__":
    main()
