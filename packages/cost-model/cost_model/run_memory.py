"""Memory of a device of a training run, from what its executor holds and what was measured.

With P the parameters of the device, z the replicas that share the optimiser (and, from the second
and third level on, gradients and parameters), A the activations of one microbatch on the stage's
layers, f the microbatches in flight, T the tokens of one, h hidden and v vocabulary:

    parameters, gradients    (2 + g + extra) P            g: what the executor accumulates in
    optimiser                12 P / z
    activations              slack f A                    A: `activation_bytes` (Korthikanti et al.)
    temporaries              [last stage] logits T v / t + buffers T h
    communication            [pipeline] staged f T h / t
    runtime                  constant

`slack` is what the allocator and saved views keep beside the counted tensors. The constants are
fitted by executor where runs with measured memory are known.
"""

from __future__ import annotations

import math

from attrs import frozen

from cost_model.memory import MemoryBreakdown, breakdown, in_flight
from cost_model.training_run import (
    TrainingRun,
    held_parameters,
    layer_kinds,
    stage_layers,
    uniform_run,
)
from cost_model.transformer import activation_bytes


@frozen(kw_only=True)
class MemoryConstants:
    """What measurements fix; bytes, and multiples of counted bytes."""

    extra: float = 0.01  # bytes per parameter beside weight, gradient and optimiser
    slack: float = 1.03  # multiple of the activations
    logits: float = 6.0  # bytes per logit
    buffers: float = 2.0  # bytes per element of the hidden state, whole on every device
    staged: float = 4.0  # the same per microbatch in flight, in pipelines
    runtime: float = 1.0e9


def run_memory(
    run: TrainingRun, stage: int = 0, constants: MemoryConstants | None = None
) -> MemoryBreakdown:
    """Return the memory of a device of `stage`: mixed precision Adam, 18 bytes per parameter."""
    c, model, executor = constants or MemoryConstants(), run.model, run.program
    layers = stage_layers(run)
    stage = min(stage, len(layers) - 1)
    last = stage == len(layers) - 1
    parameters = sum(held_parameters(run, layers, stage))
    plain, experts = held_parameters(run, layers, stage)
    replicas = run.data * run.context
    expert_replicas = max(1.0, replicas * run.tensor / run.expert)
    shard = plain / replicas + experts / expert_replicas
    held = [shard if run.zero_stage >= level else parameters for level in (3, 2, 1)]
    dense, sparse = layer_kinds(run, layers, stage)
    kept = dense * _layer_bytes(run)
    if sparse:
        kept += sparse * _expert_layer_bytes(run)
    tokens = run.micro_batch * model.seq / run.context
    hidden = tokens * model.hidden
    waiting = in_flight(_schedule(run), stage, run.pipeline, run.num_microbatches, run.chunks)
    rebuilt = _layer_bytes(run, "none") if run.recompute == "full" else 0.0
    return breakdown(
        parameter_bytes=2.0 * held[0],
        gradient_bytes=executor.accumulated_bytes * held[1] + c.extra * held[1],
        optimizer_bytes=executor.master_bytes * held[2],
        activation_bytes=kept,
        schedule=_schedule(run),
        stage=stage,
        num_stages=run.pipeline,
        num_microbatches=run.num_microbatches,
        num_chunks=run.chunks,
        recomputation_bytes=rebuilt,
        temporary_bytes=(c.logits * tokens * model.vocab / run.tensor if last else 0.0)
        + c.buffers * hidden,
        communication_bytes=c.staged * waiting * hidden / run.tensor if run.pipeline > 1 else 0.0,
        fragmentation_bytes=(c.slack - 1) * waiting * kept,
        runtime_bytes=c.runtime,
    )


def peak_memory(
    run: TrainingRun, constants: MemoryConstants | None = None, stage: int | None = None
) -> MemoryBreakdown:
    """Return the memory of `stage`, or of the stage that needs most."""
    if run.placements:
        return max(
            (
                run_memory(uniform_run(run, group, tensor), number, constants)
                for number, placed in enumerate(run.placements)
                for group, tensor in set(placed.replicas)
            ),
            key=lambda memory: memory.total,
        )
    if stage is not None:
        return run_memory(run, stage, constants)
    layers = stage_layers(run)
    count = len(layers)
    # most layers in flight; the ends hold the embedding and the output matrix beside them
    middle = max(range(count), key=lambda stage: layers[stage] * (count - stage))
    return max(
        (run_memory(run, number, constants) for number in sorted({0, middle, count - 1})),
        key=lambda memory: memory.total,
    )


def fit_probability(needed: float, capacity: float, deviation: float) -> float:
    """Return the probability that `needed` bytes fit, predicted with a log-normal error."""
    return 0.5 * (1 + math.erf(math.log(capacity / needed) / (deviation * math.sqrt(2))))


def _schedule(run: TrainingRun) -> str:
    return "interleaved-1f1b" if run.chunks > 1 else "1f1b"


def _layer_bytes(run: TrainingRun, recompute: str | None = None) -> float:
    return activation_bytes(
        run.model, run.micro_batch, run.tensor, run.context, run.sequence_parallel,
        run.recompute if recompute is None else recompute, run.fused_attention,
    )  # fmt: skip


def _expert_layer_bytes(run: TrainingRun) -> float:
    """Return the activations of a layer of experts: its dense MLP replaced by the routed tokens."""
    if run.recompute == "full":
        return _layer_bytes(run)
    model, matrices = run.model, 3 if run.model.gated else 2
    tokens = run.micro_batch * model.seq / run.context
    mine = tokens / (run.tensor if run.sequence_parallel else 1)
    dense = tokens * model.mlp_width * 2 * matrices / run.tensor
    shared = tokens * model.shared_width * 2 * matrices / run.tensor
    # tokens sorted by expert, before and after, and the experts' inner activations
    routed = (
        mine * model.experts_per_token * (2 * 2 * model.hidden + 2 * matrices * model.expert_width)
    )
    return _layer_bytes(run) - dense + shared + routed
