"""Step time of a transformer under tensor, context, expert, data and pipeline parallelism.

One training step, for a stage k of p, m microbatches and v chunks per stage  -> predict_terms():

    layer    L = |(G + C, H)|_q       G kernels, C tensor-parallel collectives, H launching on the
                                      host; the q-norm is a smooth maximum: launches run ahead
    stage    s_k = layers_k L + [first] embedding + [last] head + overhead of a microbatch
    step     T = one-forward-one-backward of the s_k and transfers  -> pipeline_time
                 + gradient reduction that no backward pass hides + optimiser update + constant

G follows the roofline of `kernel` with the shares in `StepConstants`, fitted to measured runs by
`cost_model.step_fit`. The backward pass costs twice the forward matmuls; recomputation repeats
forward work. What overlaps, how stages are cut and what is reduced are properties of the
`Executor`. Traffic is that of `collective` over the axes of `topology`, as a planner asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import evolve

from alpa_interchange.mesh import MeshAxis
from cost_model.collective import collective_seconds
from cost_model.pipeline_time import one_forward_one_backward
from cost_model.step_constants import StepConstants
from cost_model.step_layers import Layer, edge_seconds, edges_of_stages, run_axes, run_layer
from cost_model.training_run import (
    TrainingRun,
    held_parameters,
    layer_kinds,
    replica_run,
    stage_layers,
)

# Why pipelines of these kinds stall is not known; that nearly all do is seen. On 64 hosts 138 of
# 146 did: with the stall fitted to runs on at most 32 these, not fitted on, are 6 % off, without it
# 67 %. Where tensor parallelism spans four hosts 38 of 41 did, in each of the five groups that have
# any; the others have one or two microbatches. With the stall of the other pipelines they are 7 %
# off, without it 34 %. Of all others on 2 to 32 hosts about a quarter stalled
_STALLED_HOSTS = 64
_STALLED_TENSOR = 4


def predict_terms(run: TrainingRun, constants: StepConstants) -> dict[str, float]:
    """Return the step's seconds by name; they add up to the step time.

    compute         matmuls and other kernels of all microbatches, on the busiest stage
    tensor          collectives inside its layers: tensor, context and expert parallelism
    launch          host time that kernels do not hide
    head            embedding, output matrix and loss, and per-microbatch overhead
    bubble          idle time of the busiest stage while the pipeline fills and drains
    pipeline        transfers between stages
    gradients       exposed part of the gradient reduction, and of gathering parameters
    optimizer       update, and the constant per step
    """
    c = constants
    if run.placements:
        return _placed_terms(run, c)
    axes = run_axes(run, c)
    kinds = [run_layer(run, axes, c, 0)]
    if run.model.experts:
        kinds.append(run_layer(run, axes, c, run.expert))
    layers = stage_layers(run)
    edges = edges_of_stages(run, axes, c, len(layers))
    hop = 0.0
    if run.pipeline > 1:
        axis = axes["pipeline"]
        size = 2.0 * run.micro_batch * run.model.seq / run.context * run.model.hidden
        if run.sequence_parallel or run.program.scattered_messages:
            size /= run.tensor
        hop = c.pipeline_latency + size / (axis.bandwidth * c.pipeline_bandwidth)
    return _assemble(run, kinds, layers, edges, hop, axes, c)


def _assemble(
    run: TrainingRun,
    kinds: Sequence[Layer],
    layers: Sequence[float],
    edges: Sequence[float],
    hop: float,
    axes: Mapping[str, MeshAxis],
    c: StepConstants,
) -> dict[str, float]:
    m, v = run.num_microbatches, run.chunks
    counts = [layer_kinds(run, layers, stage) for stage in range(len(layers))]
    counts += [(0.0, 0.0)] * (len(edges) - len(layers))  # a stage with the loss alone

    def total(stage: int, name: str) -> float:
        pairs = zip(kinds, counts[stage], strict=False)
        return sum(count * float(getattr(kind, name)) for kind, count in pairs)

    stages = [total(stage, "seconds") + edge for stage, edge in enumerate(edges)]
    busiest = max(range(len(stages)), key=stages.__getitem__)
    still = one_forward_one_backward(stages, 0.0, m, v)
    waiting = 0.0
    if hop:
        # overlapped transfers are waited for in part; what is not stands between the stages
        waiting = one_forward_one_backward(stages, hop * c.pipeline_exposed, m, v) - still
        waiting += 2 * (run.pipeline - 1) * hop * max(0.0, 1 - c.pipeline_exposed)
    if stalls(run):
        waiting += stall_seconds(run, c)
    kernels, comm = total(busiest, "kernels"), total(busiest, "comm")
    layer_seconds = total(busiest, "seconds")
    owner = min(busiest, len(layers) - 1)
    parameters = held_parameters(run, layers, owner)
    gradients = _gradient_seconds(run, parameters, layers[owner], layer_seconds, axes, c)
    device = run.cluster.host_groups[0].device
    shards = run.data * run.context if run.zero_stage else 1
    update = sum(parameters) / shards * c.optimizer_bytes / device.memory_bandwidth
    if run.program.tensorwise_update:
        update += layers[owner] * c.step_layer
    return {
        "compute": m * kernels,
        "tensor": m * comm,
        "launch": m * (layer_seconds - kernels - comm),
        "head": m * edges[busiest],
        "bubble": still - m * stages[busiest],
        "pipeline": waiting,
        "gradients": gradients,
        "optimizer": update + c.step,
    }


def stalls(run: TrainingRun) -> bool:
    """Return whether nearly all measured pipelines like `run` stalled (`stall_seconds`)."""
    hosts = run.cluster.host_groups[0]
    spanned = run.tensor / hosts.devices_per_host
    return run.pipeline > 1 and (hosts.num_hosts >= _STALLED_HOSTS or spanned >= _STALLED_TENSOR)


def stall_seconds(run: TrainingRun, c: StepConstants) -> float:
    """Return how much longer the step takes where the network between the hosts of stages stalls.

    Every receive then takes `stall` longer; inner stages receive twice per microbatch. Of the hops
    that fill and drain the pipeline half count: what is sent ahead stalls side by side. No row
    tells which runs stalled, but of some kinds nearly all did (`stalls`).
    """
    if run.pipeline == 1 or run.cluster.host_groups[0].num_hosts == 1:
        return 0.0
    each = c.stall * (1 if run.pipeline == 2 else 2)
    return each * (run.num_microbatches + (run.pipeline - 1) / 2)


def device_lead(run: TrainingRun, c: StepConstants) -> float:
    """Return the time of the device over that of the host for a layer; 0 where none waits."""
    if not run.program.overlapped_tensor:
        return 0.0
    layer = run_layer(run, run_axes(run, c), c, 0)
    return (layer.kernels + layer.comm) / layer.host if layer.host else 0.0


def _placed_terms(run: TrainingRun, c: StepConstants) -> dict[str, float]:
    """Return the terms of stages on unlike devices: the slowest replica counts for each."""
    stages, transfers, gradients, updates = [], [], [], []
    layers, count = stage_layers(run), len(run.placements)
    for number, stage in enumerate(run.placements):
        seconds = []
        for group, tensor in set(stage.replicas):
            part = replica_run(run, group, tensor)
            axes = run_axes(part, c)
            first, *last = edge_seconds(part, axes, c)
            edge = first * (number == 0) + sum(last) * (number == count - 1) + c.microbatch
            seconds.append(stage.layers * run_layer(part, axes, c, 0).seconds + edge)
        stages.append(max(seconds))
        width = min(tensor for _, tensor in stage.replicas)
        held = sum(held_parameters(evolve(run, tensor=width), layers, number))
        kinds = [run.cluster.host_groups[group] for group, _ in stage.replicas]
        updates.append(
            held * c.optimizer_bytes / min(kind.device.memory_bandwidth for kind in kinds)
        )
        slowest = min(kind.inter_host.effective_bandwidth for kind in kinds)
        axis = MeshAxis(name="data", size=run.data, bandwidth=slowest * c.fabric_bandwidth)
        reduced = collective_seconds("all-reduce", run.program.reduced_bytes * held, (axis,))
        gradients.append(c.gradient_exposed * float(reduced) / c.gradient_bandwidth)
        if number:
            source, target = run.placements[number - 1].replicas[0], stage.replicas[0]
            link = run.cluster.link_between(source[0], target[0])
            size = 2.0 * run.micro_batch * run.model.seq * run.model.hidden
            transfers.append(
                c.pipeline_latency + size / (link.effective_bandwidth * c.pipeline_bandwidth)
            )
    m, longest = run.num_microbatches, max(stages)
    still = one_forward_one_backward(stages, 0.0, m, run.chunks)
    hop = max(transfers, default=0.0) * c.pipeline_exposed
    return {
        "compute": m * longest,
        "bubble": still - m * longest,
        "pipeline": one_forward_one_backward(stages, hop, m, run.chunks) - still,
        "gradients": max(gradients) if run.data > 1 else 0.0,
        "optimizer": max(updates) + c.step,
    }


def _gradient_seconds(
    run: TrainingRun,
    parameters: tuple[float, float],
    layers: float,
    stage_seconds: float,
    axes: Mapping[str, MeshAxis],
    c: StepConstants,
) -> float:
    """Return the exposed seconds of reducing gradients once per step.

    Overlapped, the reduction runs beside the backward pass of the last microbatch. A sharded
    optimiser scatters what it reduces and gathers the updated parameters.
    """
    group = run.data * run.context
    if group == 1 or run.zero_stage == 3:
        return 0.0
    used = tuple(axes[name] for name in ("data", "context"))
    plain, experts = parameters
    # the replicas of an expert are `expert` times fewer than those of the rest
    size = plain + experts * max(0.0, 1 - run.expert / (group * run.tensor))
    reduced = run.program.reduced_bytes * size
    if run.zero_stage:
        scattered = float(collective_seconds("reduce-scatter", reduced, used))
        gathered = float(collective_seconds("all-gather", 2.0 * size, used))
        exposed, seconds = c.sharded_exposed * gathered, scattered
        if run.program.tensorwise_update:
            kinds = ("reduce-scatter", "all-gather")
            latency = sum(float(collective_seconds(kind, 1.0, used)) for kind in kinds)
            exposed += c.sharded_calls * layers * latency
    else:
        exposed, seconds = 0.0, float(collective_seconds("all-reduce", reduced, used))
    seconds /= c.gradient_bandwidth
    exposed /= c.gradient_bandwidth
    if run.zero_stage in run.program.overlapped_gradients:
        exposed += max(c.gradient_exposed * seconds, seconds - stage_seconds * 2 / 3)
    else:
        exposed += (c.sharded_exposed if run.zero_stage else c.gradient_exposed) * seconds
    return exposed + c.gradient_latency * math.log2(group)
