"""Memory of a device of a training run, from what its executor holds and what was measured.

With P the parameters of the device, z the replicas that share the optimiser (and, from the second
and third level on, gradients and parameters), A the activations of one microbatch on the stage's
layers, f the microbatches in flight, T the tokens of one, h hidden and v vocabulary:

    parameters, gradients    (2 + g + extra) P            g: what the executor accumulates in
    optimiser                12 P / z
    activations              slack f A                    A: `activation_bytes` (Korthikanti et al.)
    temporaries              [last stage] (logits + [several microbatches] held) T v / t
                             + buffers T h
    communication            [pipeline] staged f T h / t + filling L f T h (1 - 2 / f)
                             + gathered L f T h a
    runtime                  constant

`slack` is what the allocator and saved views keep beside the counted tensors. The constants are
fitted by executor where runs with measured memory are known.

Where collectives of tensor parallelism have a stream of their own, the allocator reuses a gathered
input only when the device is done with it, and the host runs ahead: what it has asked for beyond
that grows with the layers L of the stage, by the share a of it that the host is ahead  -> _ahead().
This memory is given back where it would not fit, at a price in time, and is not needed
(`demanded_bytes`). While a pipeline fills, the sends of all microbatches but the first and the last
wait for their receivers, and what the host asks for meanwhile is needed. Where every receive
stalls the host waits with it, and nothing waits for a stream.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen

from cost_model.memory import MemoryBreakdown, breakdown, in_flight
from cost_model.step_terms import stalls
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
    # the same that the loss of the microbatch before still has where collectives have a stream of
    # their own; 1.9 to 2.7 in every fold of nanotron's rows, what it consists of is not known
    held: float = 2.5
    buffers: float = 2.0  # bytes per element of the hidden state, whole on every device
    staged: float = 4.0  # the same per microbatch in flight, in pipelines, cut where it is sent cut
    gathered: float = 3.0  # the same per layer, of inputs that wait for their stream
    filling: float = 2.0  # the same, of inputs gathered while a pipeline fills
    runtime: float = 1.0e9


# share of a device's memory beyond which the allocator had given blocks back; of 0.75, 0.82 and 0.9
# the best on the nanotron rows (9.4, 9.6 and 9.7 % off before the correction)
_KEPT = 0.75
# how sharply the host gets ahead where the device takes longer than it; fitted as 5.5 to 7
_SHARPNESS = 6.0


def run_memory(
    run: TrainingRun,
    stage: int = 0,
    constants: MemoryConstants | None = None,
    lead: float = 0.0,
) -> MemoryBreakdown:
    """Return the memory of a device of `stage`: mixed precision Adam, 18 bytes per parameter.

    `lead` is the time of the device over that of the host for a layer (`device_lead`).
    """
    needed, spare = _needed_and_spare(run, stage, constants or MemoryConstants(), lead)
    capacity = min(group.device.memory for group in run.cluster.host_groups)
    if needed.total + spare > _KEPT * capacity:
        return needed
    return evolve(needed, communication=needed.communication + spare)


def demanded_bytes(run: TrainingRun, constants: MemoryConstants, lead: float = 0.0) -> float:
    """Return the most memory of a device's first stage, with what could be given back."""
    needed, spare = _needed_and_spare(run, 0, constants, lead)
    return needed.total + spare


def _needed_and_spare(
    run: TrainingRun, stage: int, constants: MemoryConstants, lead: float
) -> tuple[MemoryBreakdown, float]:
    """Return the memory that a device of `stage` needs and what it holds beyond that."""
    c, model, executor = constants, run.model, run.program
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
    # what stages with asynchronous collectives receive is whole on every device
    staged = c.staged * waiting * hidden / (1 if executor.overlapped_tensor else run.tensor)
    filled = spare = 0.0
    logits = c.logits
    if executor.overlapped_tensor:
        logits += c.held if run.num_microbatches > 1 else 0.0
        if stalls(run):
            staged = 0.0
        elif run.tensor > 1:
            inputs = layers[stage] * waiting * hidden
            filled = c.filling * inputs * max(0.0, 1 - 2 / waiting)
            spare = max(0.0, c.gathered * inputs * _ahead(run, waiting, lead) - filled)
    needed = breakdown(
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
        temporary_bytes=(logits * tokens * model.vocab / run.tensor if last else 0.0)
        + c.buffers * hidden,
        communication_bytes=staged + filled if run.pipeline > 1 else 0.0,
        fragmentation_bytes=(c.slack - 1) * waiting * kept,
        runtime_bytes=c.runtime,
    )
    return needed, spare


def _ahead(run: TrainingRun, waiting: float, lead: float) -> float:
    """Return how far the host gets ahead, from 0 to 1: not in the first `waiting` microbatches."""
    share = float(lead**_SHARPNESS / (1 + lead**_SHARPNESS))
    return share * max(0.0, 1 - waiting / run.num_microbatches)


def peak_memory(
    run: TrainingRun,
    constants: MemoryConstants | None = None,
    stage: int | None = None,
    lead: float = 0.0,
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
        return run_memory(run, stage, constants, lead)
    layers = stage_layers(run)
    count = len(layers)
    # most layers in flight; the ends hold the embedding and the output matrix beside them
    middle = max(range(count), key=lambda stage: layers[stage] * (count - stage))
    return max(
        (run_memory(run, number, constants, lead) for number in sorted({0, middle, count - 1})),
        key=lambda memory: memory.total,
    )


def fit_probability(room: float, deviation: float) -> float:
    """Return the probability that what is needed fits, predicted with a log-normal error.

    `room` is the logarithm of the memory over what is needed of it.
    """
    return 0.5 * (1 + math.erf(room / (deviation * math.sqrt(2))))


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
