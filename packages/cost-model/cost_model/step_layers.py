"""Seconds of one layer, and of what the first and the last stage have beside their layers.

A layer takes |(G + C, H)|_q: kernels G, collectives C that they do not hide, and launches H on the
host, which run ahead.                                                          -> run_layer()
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen

from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from cost_model.collective import collective_seconds
from cost_model.kernel import KernelEfficiency, matmul_share, peak_flops
from cost_model.layer_table import measured_layer
from cost_model.step_constants import StepConstants
from cost_model.topology import logical_mesh
from cost_model.training_run import LOW_PRECISION, TrainingRun
from cost_model.transformer import LayerWork, Matmul, layer_work


def run_mesh(run: TrainingRun) -> LogicalMesh:
    """Return the logical mesh (pipeline, data, context, tensor) of the run's cluster."""
    return _mesh(run.cluster, (run.pipeline, run.data, run.context, run.tensor))


@functools.lru_cache(maxsize=4096)
def _mesh(cluster: ClusterSpec, shape: tuple[int, ...]) -> LogicalMesh:
    group = cluster.host_groups[0]
    submesh = SubmeshSpec(num_hosts=group.num_hosts, devices_per_host=group.devices_per_host)
    return logical_mesh(cluster, submesh, shape, ("pipeline", "data", "context", "tensor"))


@frozen(kw_only=True)
class Layer:
    """Seconds of one layer on one microbatch, forward and backward."""

    kernels: float
    comm: float
    host: float  # seconds of the host to launch it
    seconds: float  # with launches


def run_axes(run: TrainingRun, c: StepConstants) -> dict[str, MeshAxis]:
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
            share = c.fabric_bandwidth * (c.fabric_tensor if name == "tensor" else 1.0)
            axes[name] = evolve(
                axes[name],
                bandwidth=axes[name].bandwidth * share,
                latency=axes[name].latency + (c.fabric_latency - 1) * far / on_host,
            )
    return axes


def run_layer(
    run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants, expert: int
) -> Layer:
    """Return the seconds of a layer, as measured where the program was profiled; `expert` devices
    share its experts, 0: it has none."""
    known = _measured(run)
    if known is not None:
        return Layer(kernels=known[0], comm=0.0, host=0.0, seconds=known[0])
    return priced_layer(run, axes, c, expert)


def priced_layer(
    run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants, expert: int
) -> Layer:
    """Return the seconds of a layer by the constants alone."""
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
    if run.program.overlapped_tensor and run.tensor > 1:
        start = c.tensor_latency + _all_reduce(run, 1.0, axes["tensor"]) / c.tensor_bandwidth
        moving, beside = collective - start, kernels / collectives
        collective = start + max(c.tensor_exposed * moving, moving - beside)
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
    if expert and run.program.fused_experts and run.dtype == "mxfp8":
        kernels, comm, host = (c.fused_experts * part for part in (kernels, comm, host))
    seconds = float(launched_seconds(kernels + comm, host, c.sharpness))
    return Layer(kernels=kernels, comm=comm, host=host, seconds=seconds)


def launched_seconds(busy: Any, host: Any, sharpness: float) -> Any:
    """Return the seconds of a layer whose devices are `busy` for as many and whose host takes
    `host` to launch what they run, numbers or equal arrays: a smooth maximum, as the host runs
    ahead."""
    most, least = np.maximum(busy, host), np.minimum(busy, host)
    share = least / np.maximum(most, 1e-300)
    return most * (1 + share**sharpness) ** (1 / sharpness)


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
        share = c.matmul_share
        if grouped:
            share *= c.grouped_share * product.m / (product.m + c.grouped_rows)
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


def edges_of_stages(
    run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants, count: int
) -> list[float]:
    """Return what every stage has per microbatch beside its layers, `count` stages with any.

    Where a stage is left over (`stage_layers`), it has the loss, whose logits are sent to it.
    """
    first, product, loss = edge_seconds(run, axes, c)
    edges = [c.microbatch] * count
    edges[0] += first
    edges[-1] += product
    if count < run.pipeline:
        tokens = run.micro_batch * run.model.seq / run.context
        logits = 2.0 * tokens * run.model.vocab / run.tensor
        sent = logits / (axes["pipeline"].bandwidth * c.pipeline_bandwidth)
        edges.append(c.microbatch + loss + 2 * c.pipeline_exposed * sent)
    else:
        edges[-1] += loss
    return edges


def edge_seconds(
    run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants
) -> tuple[float, float, float]:
    """Return seconds per microbatch of (embedding, output matrix, loss), as measured where the
    program was profiled."""
    known = _measured(run)
    if known is not None:
        return known[1], known[2], 0.0
    return priced_edges(run, axes, c)


def priced_edges(
    run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants
) -> tuple[float, float, float]:
    """Return seconds per microbatch of (embedding, output matrix, loss) by the constants alone."""
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
    return embedding, c.head * matmul + table, c.head * c.loss * logits
