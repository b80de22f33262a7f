"""Predictions of training steps: time with an interval, memory, FLOPs and utilisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from importlib import resources

from attrs import field, frozen

from alpa_interchange.document import from_json
from cost_model.correction import Correction
from cost_model.kernel import peak_flops
from cost_model.memory import MemoryBreakdown, breakdown
from cost_model.training_run import StepConstants, TrainingRun, predict_terms
from cost_model.transformer import activation_bytes, step_flops


@frozen(kw_only=True)
class FittedModel:
    """Constants fitted to measured runs, the correction near them, and how far off it may be."""

    constants: StepConstants = field(factory=StepConstants)
    correction: Correction = field(factory=Correction)
    interval_scale: float = 1.2816  # half width of the 80 % interval in standard deviations
    interval_scale_hosts: float = 1.2816  # the same for runs over several hosts
    sources: tuple[str, ...] = ()  # where the rows came from
    num_rows: int = 0
    fitted_on: str = ""  # which part of the rows
    seed: int = 0


@frozen(kw_only=True)
class StepModel:
    """The shipped fits: on all rows, and without each fold for judging that fold."""

    whole: FittedModel
    folds: tuple[FittedModel, ...] = ()
    fold_of_group: Mapping[str, int] = field(factory=dict)  # "source|group" -> fold

    def unseen(self, source: str, group: str) -> FittedModel:
        """Return the fit that has not seen `group` of `source`; the whole one for new groups."""
        fold = self.fold_of_group.get(f"{source}|{group}")
        return self.whole if fold is None else self.folds[fold]


@frozen(kw_only=True)
class Prediction:
    """One training step, predicted; FLOPs are those of the whole job."""

    step_seconds: float
    low_seconds: float  # 80 % of measurements fall between low and high
    high_seconds: float
    terms: Mapping[str, float]  # seconds by name; they add up to step_seconds
    memory: MemoryBreakdown  # of a device of the first stage
    model_flops: float
    hardware_flops: float  # with recomputation
    mfu: float  # model FLOPs over what the devices could do in the time
    hfu: float  # hardware FLOPs over the same


@functools.cache
def step_model() -> StepModel:
    """Return the fits shipped with the package (`python -m cost_model.step_fit` made them)."""
    text = resources.files("cost_model").joinpath("data/step_model.json").read_text("utf-8")
    return from_json(text, StepModel, source="cost_model/data/step_model.json")


def predict(run: TrainingRun, model: FittedModel | None = None) -> Prediction:
    """Return the prediction of one step of `run`, by default with the shipped constants."""
    fitted = step_model().whole if model is None else model
    terms = predict_terms(run, fitted.constants)
    mean, deviation = fitted.correction.at(run)
    factor = math.exp(mean)
    terms = {name: seconds * factor for name, seconds in terms.items()}
    step = sum(terms.values())
    many_hosts = run.cluster.host_groups[0].num_hosts > 1
    deviation = math.hypot(deviation, fitted.correction.scatter(many_hosts))
    scale = fitted.interval_scale_hosts if many_hosts else fitted.interval_scale
    spread = math.exp(scale * deviation)
    useful, executed = step_flops(run.model, run.global_batch, run.recompute)
    device = run.cluster.host_groups[0].device
    possible = step * run.cluster.num_devices * peak_flops(device, run.dtype)
    return Prediction(
        step_seconds=step,
        low_seconds=step / spread,
        high_seconds=step * spread,
        terms=terms,
        memory=run_memory(run),
        model_flops=useful,
        hardware_flops=executed,
        mfu=useful / possible,
        hfu=executed / possible,
    )


def run_memory(run: TrainingRun, stage: int = 0) -> MemoryBreakdown:
    """Return the memory of a device of `stage`: mixed precision Adam, 18 bytes per parameter.

    2 bytes of parameter and 4 of gradient; 12 of optimiser (master copy and two moments in single
    precision), split over data parallelism with a sharded optimiser. Activations follow Korthikanti
    et al. (2022), the interleaved schedule's p (1 + (p - 1) / (p v)) microbatches included.
    """
    model = run.model
    per_stage = model.layers / run.pipeline
    parameters = per_stage * model.layer_parameters / run.tensor
    if stage in (0, run.pipeline - 1):
        parameters += model.vocab * model.hidden / run.tensor
    shards = run.data * run.context if run.sharded_optimizer else 1
    layer = activation_bytes(
        model,
        run.micro_batch,
        run.tensor,
        run.context,
        run.sequence_parallel,
        run.recompute,
        run.fused_attention,
    )
    rebuilt = 0.0
    if run.recompute == "full":
        rebuilt = activation_bytes(
            model, run.micro_batch, run.tensor, run.context, run.sequence_parallel, "none",
            run.fused_attention,
        )  # fmt: skip
    tokens = run.micro_batch * model.seq / run.context
    logits = tokens * model.vocab / run.tensor * 6 if stage == run.pipeline - 1 else 0.0
    hidden = 2.0 * tokens * model.hidden
    return breakdown(
        parameter_bytes=2.0 * parameters,
        gradient_bytes=4.0 * parameters,
        optimizer_bytes=12.0 * parameters / shards,
        activation_bytes=per_stage * layer,
        schedule="interleaved-1f1b" if run.chunks > 1 else "1f1b",
        stage=stage,
        num_stages=run.pipeline,
        num_microbatches=run.num_microbatches,
        num_chunks=run.chunks,
        recomputation_bytes=rebuilt,
        temporary_bytes=logits,
        communication_bytes=2 * hidden if run.pipeline > 1 else 0.0,
        fragmentation_share=0.03,
        runtime_bytes=1.0e9,
    )
