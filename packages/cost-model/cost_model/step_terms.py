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

import functools
import math
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from cost_model.collective import collective_seconds
from cost_model.kernel import KernelEfficiency, matmul_share, peak_flops
from cost_model.layer_table import measured_layer
from cost_model.pipeline_time import one_forward_one_backward
from cost_model.topology import logical_mesh
from cost_model.training_run import (
    LOW_PRECISION,
    TrainingRun,
    held_parameters,
    layer_kinds,
    replica_run,
    stage_layers,
)
from cost_model.transformer import LayerWork, Matmul, layer_work


@frozen(kw_only=True)
class StepConstants:
    """What measurements fix: shares of peak, seconds, and bytes per element; all above 0."""

    matmul_share: float = 0.85  # of peak, for large aligned matmuls
    half_depth: float = 128.0  # contracted size at half efficiency
    half_columns: float = 256.0  # result columns at half efficiency
    attention_share: float = 0.35  # of peak, score and context products written to memory
    fused_attention_share: float = 0.45  # of peak, FlashAttention-2, forward and backward
    memory_share: float = 0.75  # of memory bandwidth, for non-matmul kernels
    backward_memory: float = 1.8  # non-matmul traffic of the backward pass over the forward's
    unfused_memory: float = 1.5  # non-matmul traffic without fused kernels over with them
    launch: float = 2.9e-3  # host seconds per layer, forward and backward
    launch_collective: float = 4e-4  # host seconds per layer more with tensor parallelism
    launch_group: float = 2e-4  # host seconds per layer more for each doubling of its group
    # the same more for each tensor-parallel device while stages on other hosts exchange messages
    launch_staged: float = 1e-5
    launch_recompute: float = 0.33  # host seconds of a repeated forward over forward and backward
    sharpness: float = 6.0  # exponent of the smooth maximum of kernels and launches
    head: float = 1.0  # output matrix and loss: multiple of the roofline
    embedding: float = 1e-9  # seconds per element of the embedded tokens, backward
    microbatch: float = 2e-3  # seconds per microbatch outside layers
    tensor_bandwidth: float = 0.9  # of the link fit, for tensor-parallel collectives
    tensor_latency: float = 2e-5  # seconds per tensor-parallel collective
    pipeline_latency: float = 1e-4  # seconds per transfer between stages
    pipeline_bandwidth: float = 0.8  # of the link, for transfers between stages
    pipeline_exposed: float = 0.2  # share of steady-state transfers that stages wait for
    context_exposed: float = 0.3  # share of the key-value ring that attention does not hide
    gradient_bandwidth: float = 0.7  # of the link fit, for gradient reductions
    gradient_latency: float = 1e-4  # seconds per doubling of the data-parallel group
    sharded_exposed: float = 1.0  # the same of scattering gradients and gathering parameters
    fabric_bandwidth: float = 1.0  # of the link, for collectives that leave a host
    fabric_latency: float = 1.0  # multiple of the link's latency for the same
    expert_exposed: float = 1.0  # share of the experts' all-to-all that computation does not hide
    grouped_share: float = 0.6  # of a plain matmul's rate, products of many small experts
    scaling: float = 1.0  # multiple of the traffic of scaling to eight or four bits
    gradient_exposed: float = 0.9  # share of the reduction that computation does not hide
    optimizer_bytes: float = 40.0  # memory traffic of the update per parameter
    step: float = 3e-3  # seconds per step


def run_mesh(run: TrainingRun) -> LogicalMesh:
    """Return the logical mesh (pipeline, data, context, tensor) of the run's cluster."""
    return _mesh(run.cluster, (run.pipeline, run.data, run.context, run.tensor))


@functools.lru_cache(maxsize=4096)
def _mesh(cluster: ClusterSpec, shape: tuple[int, ...]) -> LogicalMesh:
    group = cluster.host_groups[0]
    submesh = SubmeshSpec(num_hosts=group.num_hosts, devices_per_host=group.devices_per_host)
    return logical_mesh(cluster, submesh, shape, ("pipeline", "data", "context", "tensor"))


@frozen(kw_only=True)
class _Layer:
    """Seconds of one layer on one microbatch, forward and backward."""

    kernels: float
    comm: float
    seconds: float  # with launches


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
    axes = _axes(run, c)
    kinds = [_layer(run, axes, c, 0)]
    if run.model.experts:
        kinds.append(_layer(run, axes, c, run.expert))
    layers = stage_layers(run)
    first, last = _edge_seconds(run, axes, c)
    edges = [c.microbatch] * len(layers)
    edges[0] += first
    edges[-1] += last
    hop = 0.0
    if run.pipeline > 1:
        axis = axes["pipeline"]
        size = 2.0 * run.micro_batch * run.model.seq / run.context * run.model.hidden
        if run.sequence_parallel:
            size /= run.tensor
        hop = c.pipeline_latency + size / (axis.bandwidth * c.pipeline_bandwidth)
    return _assemble(run, kinds, layers, edges, hop, axes, c)


def _assemble(
    run: TrainingRun,
    kinds: Sequence[_Layer],
    layers: Sequence[float],
    edges: Sequence[float],
    hop: float,
    axes: Mapping[str, MeshAxis],
    c: StepConstants,
) -> dict[str, float]:
    m, v = run.num_microbatches, run.chunks
    counts = [layer_kinds(run, layers, stage) for stage in range(len(layers))]

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
    kernels, comm = total(busiest, "kernels"), total(busiest, "comm")
    layer_seconds = total(busiest, "seconds")
    parameters = held_parameters(run, layers, busiest)
    gradients = _gradient_seconds(run, parameters, layer_seconds, axes, c)
    device = run.cluster.host_groups[0].device
    shards = run.data * run.context if run.zero_stage else 1
    update = sum(parameters) / shards * c.optimizer_bytes / device.memory_bandwidth
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


def _placed_terms(run: TrainingRun, c: StepConstants) -> dict[str, float]:
    """Return the terms of stages on unlike devices: the slowest replica counts for each."""
    stages, transfers, gradients, updates = [], [], [], []
    layers, count = stage_layers(run), len(run.placements)
    for number, stage in enumerate(run.placements):
        seconds = []
        for group, tensor in set(stage.replicas):
            part = replica_run(run, group, tensor)
            axes = _axes(part, c)
            first, last = _edge_seconds(part, axes, c)
            edge = first * (number == 0) + last * (number == count - 1) + c.microbatch
            seconds.append(stage.layers * _layer(part, axes, c, 0).seconds + edge)
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


def _axes(run: TrainingRun, c: StepConstants) -> dict[str, MeshAxis]:
    """Return the axes by name, those between hosts with the fabric's fitted shares."""
    axes = dict(zip(("pipeline", "data", "context", "tensor"), run_mesh(run).axes, strict=True))
    per_host = run.cluster.host_groups[0].devices_per_host
    if run.cluster.num_devices == per_host:
        return axes
    far = run.cluster.host_groups[0].inter_host.latency
    stride = 1
    for name in ("tensor", "context", "data"):
        on_host = min(max(1, per_host // stride), axes[name].size)
        stride *= axes[name].size
        if axes[name].size > 1 and (stride > per_host or per_host % stride):
            axes[name] = evolve(
                axes[name],
                bandwidth=axes[name].bandwidth * c.fabric_bandwidth,
                latency=axes[name].latency + (c.fabric_latency - 1) * far / on_host,
            )
    return axes


def _layer(run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants, expert: int) -> _Layer:
    """Return the seconds of a layer; `expert` devices share its experts, 0: it has none."""
    device = run.cluster.host_groups[0].device
    work = layer_work(
        run.model, run.micro_batch, run.tensor, run.context, run.sequence_parallel,
        run.fused_attention, expert,
    )  # fmt: skip
    bandwidth = device.memory_bandwidth * c.memory_share
    matmul, attention = _matmul_seconds(work, run, c)
    unfused = 1.0 if run.fused_elementwise else c.unfused_memory
    traffic, scores = work.memory_bytes * unfused / bandwidth, work.attention_bytes * unfused
    kernels = 3 * (matmul + attention) + traffic * (1 + c.backward_memory)
    if run.dtype in LOW_PRECISION:
        kernels += c.scaling * _scaling_bytes(work) / bandwidth
    host = 0.0 if run.program.compiled else c.launch
    collective, collectives = _tensor_collective(run, work, axes, c)
    comm = collective * collectives + 3 * _context_ring(run, axes, c)
    if run.tensor > 1 and not run.program.compiled:
        host += c.launch_collective + c.launch_group * (math.log2(run.tensor) - 1)
        if run.pipeline > 1 and run.cluster.host_groups[0].num_hosts > 1:
            host += c.launch_staged * run.tensor
            host += collectives * _all_reduce(run, 1.0, axes["tensor"])
    if expert > 1:
        # tokens go to their experts and back, and their gradients the same way
        axis = _expert_axis(run, c)
        sent = float(collective_seconds("all-to-all", work.routed_bytes, (axis,)))
        comm += 4 * c.expert_exposed * sent
    if run.recompute == "full":
        again = run.recompute_share
        kernels += again * (matmul + attention + traffic)
        comm += again * collective * collectives / 2
        host *= 1 + again * c.launch_recompute
    elif run.recompute == "selective":
        kernels += run.recompute_share * (attention + scores / bandwidth)
        host *= 1 + run.recompute_share * c.launch_recompute / 3
    if run.zero_stage == 3:
        comm += _sharded_layer(run, kernels, axes, c)
    known = _measured(run)
    if known is not None:
        return _Layer(kernels=known[0], comm=0.0, seconds=known[0])
    busy = kernels + comm
    q = c.sharpness
    seconds = max(busy, host) * (1 + (min(busy, host) / max(busy, host)) ** q) ** (1 / q)
    return _Layer(kernels=kernels, comm=comm, seconds=seconds)


def _measured(run: TrainingRun) -> tuple[float, float, float] | None:
    """Return measured seconds of (a layer, the embedding, the head), for programs that have any."""
    if not run.program.profiled or run.recompute != "none" or run.context > 1:
        return None
    device = run.cluster.host_groups[0].device.name
    return measured_layer(device, run.model, run.tensor, run.micro_batch)


def _sharded_layer(
    run: TrainingRun, kernels: float, axes: Mapping[str, MeshAxis], c: StepConstants
) -> float:
    """Return the exposed seconds of gathering a layer twice and scattering its gradients."""
    group = tuple(axes[name] for name in ("data", "context"))
    size = 2.0 * run.model.layer_parameters / run.tensor
    gathered = float(collective_seconds("all-gather", size, group))
    scattered = float(collective_seconds("reduce-scatter", size, group))
    traffic = (2 * gathered + scattered) / c.gradient_bandwidth
    return max(c.gradient_exposed * traffic, traffic - kernels)


def _scaling_bytes(work: LayerWork) -> float:
    """Return the traffic of scaling the operands of three products each to eight bits.

    Inputs and their gradients are read in half precision and written twice, as rows and columns;
    so is the weight, once per microbatch.
    """
    return sum(
        product.batch * (4 * product.m * (product.k + product.n) + 4 * product.k * product.n)
        for product in work.matmuls
        if product.kind != "attention"
    )


def _matmul_seconds(work: LayerWork, run: TrainingRun, c: StepConstants) -> tuple[float, float]:
    """Return (projections, attention products) in seconds of one forward pass of one layer."""
    device = run.cluster.host_groups[0].device
    peak = peak_flops(device, LOW_PRECISION.get(run.dtype, run.dtype)) * device.sustained
    half = peak_flops(device, run.width_dtype) * device.sustained
    bandwidth = device.memory_bandwidth * c.memory_share
    matmul = 0.0
    for product in work.matmuls:
        if product.kind == "attention":
            continue
        grouped = product.kind == "grouped"
        share = c.matmul_share * (c.grouped_share if grouped else 1.0)
        compute = product.flops / (peak * share * _shape_share(product, device.num_units, c))
        read = 2.0 * product.batch * product.k * product.n / bandwidth if grouped else 0.0
        matmul += max(compute, read)
    share = c.fused_attention_share if run.fused_attention else c.attention_share
    return matmul, work.attention_flops / (half * share)


def _shape_share(product: Matmul, units: int, c: StepConstants) -> float:
    shape = (product.batch, int(product.m) or 1, int(product.n), int(product.k))
    narrow = product.n / (product.n + c.half_columns)
    return _matmul_share(shape, units, c.half_depth) * narrow


@functools.lru_cache(maxsize=65536)
def _matmul_share(shape: tuple[int, ...], units: int, half_depth: float) -> float:
    return matmul_share(shape, units, KernelEfficiency(half_depth=half_depth))


def _tensor_collective(
    run: TrainingRun, work: LayerWork, axes: Mapping[str, MeshAxis], c: StepConstants
) -> tuple[float, int]:
    """Return (seconds of one tensor-parallel all-reduce, how many per layer and microbatch).

    Sequence parallelism splits each into an all-gather and a reduce-scatter of the same bytes.
    """
    if run.tensor == 1:
        return 0.0, 4
    seconds = _all_reduce(run, work.hidden_bytes, axes["tensor"])
    return c.tensor_latency + seconds / c.tensor_bandwidth, 4


def _all_reduce(run: TrainingRun, size: float, axis: MeshAxis) -> float:
    """Return the seconds of a tensor-parallel all-reduce of `size` bytes, or its two halves."""
    kinds = ("all-gather", "reduce-scatter") if run.sequence_parallel else ("all-reduce",)
    return sum(float(collective_seconds(kind, size, (axis,))) for kind in kinds)


def _context_ring(run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants) -> float:
    """Return the exposed seconds of passing key-value blocks around in one forward of a layer."""
    if run.context == 1:
        return 0.0
    model = run.model
    kv = (model.qkv_width - model.attention_width) / run.tensor
    size = 2.0 * run.micro_batch * model.seq * kv
    seconds = collective_seconds("all-gather", size, (axes["context"],))
    return c.context_exposed * float(seconds)


def _expert_axis(run: TrainingRun, c: StepConstants) -> MeshAxis:
    """Return the axis of `expert` neighbours: those of one stage, tensor-parallel ones included."""
    axis = _mesh(run.cluster, (run.cluster.num_devices // run.expert, 1, 1, run.expert)).axes[3]
    if run.expert > run.cluster.host_groups[0].devices_per_host:
        return evolve(axis, bandwidth=axis.bandwidth * c.fabric_bandwidth)
    return axis


def _edge_seconds(
    run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants
) -> tuple[float, float]:
    """Return seconds per microbatch that the first and the last stage have more than the others."""
    known = _measured(run)
    if known is not None:
        return known[1], known[2]
    model, device = run.model, run.cluster.host_groups[0].device
    peak = peak_flops(device, run.width_dtype) * device.sustained
    bandwidth = device.memory_bandwidth * c.memory_share
    tokens = run.micro_batch * model.seq / run.context
    columns = model.vocab / run.tensor
    product = Matmul(kind="matmul", batch=1, m=tokens, n=columns, k=model.hidden)
    matmul = (
        3 * product.flops / (peak * c.matmul_share * _shape_share(product, device.num_units, c))
    )
    # logits: written in half precision, loss read and written in single, several passes
    logits = tokens * columns * 28 / bandwidth
    table = columns * model.hidden * 8 / bandwidth  # gradient of the table: zeroed, added
    embedding = c.embedding * tokens * model.hidden / run.tensor + table
    return embedding, c.head * (matmul + logits) + table


def _gradient_seconds(
    run: TrainingRun,
    parameters: tuple[float, float],
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
    else:
        exposed, seconds = 0.0, float(collective_seconds("all-reduce", reduced, used))
    seconds /= c.gradient_bandwidth
    exposed /= c.gradient_bandwidth
    if run.zero_stage in run.program.overlapped_gradients:
        exposed += max(c.gradient_exposed * seconds, seconds - stage_seconds * 2 / 3)
    else:
        exposed += (c.sharded_exposed if run.zero_stage else c.gradient_exposed) * seconds
    return exposed + c.gradient_latency * math.log2(group)
