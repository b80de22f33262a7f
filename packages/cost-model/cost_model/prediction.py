"""Predictions of training steps: time with an interval, memory, FLOPs and utilisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from importlib import resources

from attrs import field, frozen

from alpa_interchange.document import from_json
from cost_model.correction import Correction
from cost_model.executor import EXECUTORS
from cost_model.kernel import peak_flops
from cost_model.memory import MemoryBreakdown
from cost_model.run_memory import (
    MemoryConstants,
    demanded_bytes,
    fit_probability,
    peak_memory,
)
from cost_model.step_constants import StepConstants
from cost_model.step_terms import device_lead, predict_terms
from cost_model.training_run import LOW_PRECISION, TrainingRun, start_problem
from cost_model.transformer import step_flops

DEFAULT_EXECUTOR = "megatron-deepspeed"
# share of a device's memory beyond which its allocator has to give blocks back. All nine nanotron
# pipelines that held more took 0.5 to 2.2 s longer for every microbatch, none of the 40 rows next
# to them. Without stages what is held can be given back at once: those that were slow wanted 1.15
# to 2.4 times the memory, others up to 0.98 times
NEARLY_FULL = 0.88
_OVERDRAWN = 1.1
# multiple of a device's memory that a pipeline may want: what waits is given back in whole
# segments, which microbatches in flight share. No nanotron pipeline that ran wanted more than 1.13;
# four that need less than there is wanted 1.26 to 1.47, and failed. Without stages up to 2.3 ran
_WANTED = 1.15
_NORMAL = (-1.2816, 1.2816)  # deviations that hold 80 % of a normal distribution


@frozen(kw_only=True)
class FittedModel:
    """Constants fitted to measured runs, the correction near them, and how far off it may be."""

    constants: StepConstants = field(factory=StepConstants)
    correction: Correction = field(factory=Correction)
    # the 80 % interval of unseen runs in standard deviations, by kind of run (`run_kind`)
    intervals: Mapping[str, tuple[float, float]] = field(factory=dict)
    memory: MemoryConstants = field(factory=MemoryConstants)
    memory_correction: Correction = field(factory=Correction)
    memory_deviation: float = 0.1  # log error of the memory of unseen runs
    # odds of fitting below which a run is taken to fail: where enough runs were measured, so that
    # at most 2 % of those that ran would have been (`step_fit`)
    least_odds: float = 0.5
    sources: tuple[str, ...] = ()  # where the rows came from
    num_rows: int = 0
    fitted_on: str = ""  # which part of the rows
    seed: int = 0

    def interval(self, run: TrainingRun) -> tuple[float, float]:
        """Return the bounds of the 80 % interval of `run` in standard deviations.

        Where nothing was measured on its device they are at least those of a normal distribution.
        """
        low, high = self.intervals.get(run_kind(run), self.intervals.get("all", _NORMAL))
        if self.correction.knows(run):
            return low, high
        return min(low, _NORMAL[0]), max(high, _NORMAL[1])

    def peak(self, run: TrainingRun, stage: int | None = None) -> MemoryBreakdown:
        """Return the memory of a device of `stage`, or of the stage that needs most."""
        return peak_memory(run, self.memory, stage, device_lead(run, self.constants))

    def room(self, run: TrainingRun) -> float:
        """Return the logarithm of a device's memory over what the fullest stage needs of it."""
        needed = self.peak(run).total
        if run.program.overlapped_tensor and run.pipeline > 1:
            wanted = demanded_bytes(run, self.memory, device_lead(run, self.constants))
            needed = max(needed, wanted / _WANTED)
        capacity = min(group.device.memory for group in run.cluster.host_groups)
        return math.log(capacity / (needed * self.memory_factor(run)))

    def fit_probability(self, run: TrainingRun) -> float:
        """Return the probability that a device of every stage has the memory that it needs."""
        return fit_probability(self.room(run), self.memory_deviation)

    def fails(self, run: TrainingRun) -> bool:
        """Return whether to expect that `run` fails: it fits with too low odds, or has a
        `start_problem`."""
        return start_problem(run) != "" or self.fit_probability(run) < self.least_odds

    def memory_factor(self, run: TrainingRun) -> float:
        """Return what measured runs nearby needed over what was predicted for them."""
        return math.exp(self.memory_correction.at(run)[0])

    def reclaiming(self, run: TrainingRun) -> float:
        """Return the seconds of a step that the allocator takes where memory is nearly full."""
        if not self.constants.reclaim:
            return 0.0
        demanded = demanded_bytes(run, self.memory, device_lead(run, self.constants))
        capacity = run.cluster.host_groups[0].device.memory
        most = NEARLY_FULL if run.pipeline > 1 else _OVERDRAWN
        if demanded * self.memory_factor(run) < most * capacity:
            return 0.0
        return run.num_microbatches * self.constants.reclaim


def run_kind(run: TrainingRun) -> str:
    """Return which runs share an interval: on one host, on several, with stages on several."""
    if run.cluster.host_groups[0].num_hosts == 1:
        return "host"
    return "stages" if run.pipeline > 1 else "hosts"


@frozen(kw_only=True)
class StepModel:
    """The fits of one executor: on all rows, and without each fold for judging that fold."""

    whole: FittedModel
    folds: tuple[FittedModel, ...] = ()
    fold_of_group: Mapping[str, int] = field(factory=dict)  # "source|group" -> fold

    def unseen(self, source: str, group: str) -> FittedModel:
        """Return the fit that has not seen `group` of `source`; the whole one for new groups."""
        fold = self.fold(source, group)
        return self.whole if fold is None else self.folds[fold]

    def fold(self, source: str, group: str) -> int | None:
        """Return the fold that has not seen `group` of `source`, None for new groups."""
        return self.fold_of_group.get(f"{source}|{group}")


@frozen(kw_only=True)
class Prediction:
    """One training step, predicted; FLOPs are those of the whole job."""

    step_seconds: float
    low_seconds: float  # 80 % of measurements fall between low and high
    high_seconds: float
    terms: Mapping[str, float]  # seconds by name; they add up to step_seconds
    memory: MemoryBreakdown  # of a device of the stage that needs most
    memory_bytes: float  # its total, corrected by measured runs nearby
    fit_probability: float  # that it fits into a device
    model_flops: float
    hardware_flops: float  # with recomputation
    mfu: float  # model FLOPs over what the devices could do in the time
    hfu: float  # hardware FLOPs over the same
    problem: str  # why the run cannot start, if so
    based_on: str  # what the seconds rest on: runs measured nearby, or the data sheet only


@functools.cache
def step_model(executor: str = DEFAULT_EXECUTOR) -> StepModel:
    """Return the shipped fits that describe `executor` (`python -m cost_model.step_fit`)."""
    name = model_file(EXECUTORS[executor].fitted_as)
    text = resources.files("cost_model").joinpath(f"data/{name}").read_text("utf-8")
    return from_json(text, StepModel, source=f"cost_model/data/{name}")


def model_file(fitted_as: str) -> str:
    """Return the name of the file with the fits of an executor."""
    return f"step_{fitted_as.replace('-', '_')}.json"


def predict(run: TrainingRun, model: FittedModel | None = None) -> Prediction:
    """Return the prediction of one step of `run`, by default with the shipped constants."""
    fitted = step_model(run.executor).whole if model is None else model
    terms = predict_terms(run, fitted.constants)
    mean, deviation = fitted.correction.at(run)
    based_on = "data sheet only"
    if fitted.correction.knows(run):
        near = deviation < 0.8 * fitted.correction.scale
        based_on = "measured runs nearby" if near else "measured runs on this device"
    factor = math.exp(mean)
    terms = {name: seconds * factor for name, seconds in terms.items()}
    terms["allocator"] = fitted.reclaiming(run)
    step = sum(terms.values())
    many_hosts = run.cluster.host_groups[0].num_hosts > 1
    deviation = math.hypot(deviation, fitted.correction.scatter(many_hosts))
    low, high = fitted.interval(run)
    useful, executed = step_flops(run.model, run.global_batch, run.recompute)
    dtype = LOW_PRECISION.get(run.dtype, run.dtype)
    groups = run.cluster.host_groups
    possible = step * sum(g.num_devices * peak_flops(g.device, dtype) for g in groups)
    memory = fitted.peak(run)
    return Prediction(
        step_seconds=step,
        low_seconds=step * math.exp(low * deviation),
        high_seconds=step * math.exp(high * deviation),
        terms=terms,
        memory=memory,
        memory_bytes=memory.total * fitted.memory_factor(run),
        fit_probability=fitted.fit_probability(run),
        model_flops=useful,
        hardware_flops=executed,
        mfu=useful / possible,
        hfu=executed / possible,
        problem=start_problem(run),
        based_on=based_on,
    )
