"""Step time of a transformer under tensor, context, data and pipeline parallelism.

One training step, for a stage k of p, m microbatches and v chunks per stage  -> predict_terms():

    layer    L = |(G + C, H)|_q       G kernels, C tensor-parallel collectives, H launching on the
                                      host; the q-norm is a smooth maximum: launches run ahead
    stage    S_k = layers_k L + [first] embedding + [last] head
    step     T = m max_k S_k                           steady state of the slowest stage
                 + (sum_k S_k - max_k S_k) / v         filling and draining the pipeline
                 + transfers between stages + gradient reduction + optimiser update + constant

G follows the roofline of `kernel` with the shares in `StepConstants`, fitted to measured runs by
`cost_model.step_fit`. The backward pass costs twice the forward matmuls; recomputation repeats
forward work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from attrs import field, frozen, validators

from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from cost_model.collective import collective_seconds
from cost_model.kernel import KernelEfficiency, matmul_share, peak_flops
from cost_model.topology import logical_mesh
from cost_model.transformer import LayerWork, Matmul, TransformerSpec, layer_work

RECOMPUTE = ("none", "selective", "full")


@frozen(kw_only=True)
class TrainingRun:
    """A transformer on a cluster with a parallel configuration; sizes as in Megatron-LM."""

    model: TransformerSpec
    cluster: ClusterSpec
    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    chunks: int = 1  # model chunks per pipeline stage (interleaved schedule)
    recompute: str = field(default="none", validator=validators.in_(RECOMPUTE))
    recompute_share: float = 1.0  # share of the layers that recompute
    sequence_parallel: bool = False
    fused_attention: bool = False  # FlashAttention: no score matrix in memory
    fused_elementwise: bool = False  # bias, dropout, mask and softmax fused into few kernels
    sharded_optimizer: bool = False
    compiled: bool = False  # one program per step (XLA): nothing waits for kernel launches
    dtype: str = "float16"

    def __attrs_post_init__(self) -> None:
        devices = self.tensor * self.context * self.data * self.pipeline
        if devices != self.cluster.num_devices:
            raise ValueError(
                f"tensor x context x data x pipeline is {devices}, but cluster "
                f"{self.cluster.name!r} has {self.cluster.num_devices} devices"
            )
        if self.global_batch % (self.data * self.micro_batch):
            raise ValueError(
                f"global_batch {self.global_batch} must be a multiple of data x micro_batch = "
                f"{self.data} x {self.micro_batch}"
            )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.data * self.micro_batch)


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


def predict_terms(run: TrainingRun, constants: StepConstants) -> dict[str, float]:
    """Return the step's seconds by name; they add up to the step time.

    compute         matmuls and other kernels of one microbatch times their number, busiest stage
    tensor          tensor-parallel collectives of the same
    launch          host time that kernels do not hide
    head            embedding, output matrix and loss, and per-microbatch overhead
    bubble          idle time of the busiest stage while the pipeline fills and drains
    pipeline        transfers between stages
    gradients       exposed part of the gradient reduction
    optimizer       update, and the constant per step
    """
    c = constants
    model, device = run.model, run.cluster.host_groups[0].device
    axes = dict(zip(("pipeline", "data", "context", "tensor"), run_mesh(run).axes, strict=True))
    work = layer_work(
        model, run.micro_batch, run.tensor, run.context, run.sequence_parallel, run.fused_attention
    )
    peak = peak_flops(device, run.dtype) * device.sustained
    bandwidth = device.memory_bandwidth * c.memory_share
    matmul, attention = _matmul_seconds(work, run, peak, c)
    traffic = work.memory_bytes * (1.0 if run.fused_elementwise else c.unfused_memory) / bandwidth
    scores = work.attention_bytes * (1.0 if run.fused_elementwise else c.unfused_memory) / bandwidth
    kernels = 3 * (matmul + attention) + traffic * (1 + c.backward_memory)
    host = 0.0 if run.compiled else c.launch
    collective, collectives = _tensor_collective(run, work, axes, c)
    if run.tensor > 1 and not run.compiled:
        host += c.launch_collective + c.launch_group * (math.log2(run.tensor) - 1)
    comm = collective * collectives
    ring = _context_ring(run, axes, c)
    comm += 3 * ring
    if run.recompute == "full":
        again = run.recompute_share
        kernels += again * (matmul + attention + traffic)
        comm += again * collective * collectives / 2
        host *= 1 + again * c.launch_recompute
    elif run.recompute == "selective":
        kernels += run.recompute_share * (attention + scores)
        host *= 1 + run.recompute_share * c.launch_recompute / 3
    busy = kernels + comm
    q = c.sharpness
    layer = max(busy, host) * (1 + (min(busy, host) / max(busy, host)) ** q) ** (1 / q)
    first, last = _edge_seconds(run, peak, bandwidth, c)
    return _assemble(run, layer, kernels, comm, first, last, axes, c)


def _assemble(
    run: TrainingRun,
    layer: float,
    kernels: float,
    comm: float,
    first: float,
    last: float,
    axes: Mapping[str, MeshAxis],
    c: StepConstants,
) -> dict[str, float]:
    p, m, v = run.pipeline, run.num_microbatches, run.chunks
    per_stage = run.model.layers / p
    stage = per_stage * layer
    longest = stage + (first + last if p == 1 else max(first, last, 0.0)) + c.microbatch
    total = p * stage + first + last + p * c.microbatch
    steady = m * longest
    bubble = (total - longest) / v
    pipe = 0.0
    if p > 1:
        size = 2.0 * run.micro_batch * run.model.seq / run.context * run.model.hidden
        if run.sequence_parallel:
            size /= run.tensor
        axis = axes["pipeline"]
        hop = c.pipeline_latency + size / (axis.bandwidth * c.pipeline_bandwidth)
        # filling and draining cross every boundary; later transfers overlap with other microbatches
        pipe = hop * (2 * m * v * c.pipeline_exposed + 2 * (p - 1))
    device = run.cluster.host_groups[0].device
    parameters = per_stage * run.model.layer_parameters / run.tensor
    parameters += run.model.vocab * run.model.hidden / run.tensor
    gradients = _gradient_seconds(run, parameters, axes, c)
    shards = run.data * run.context if run.sharded_optimizer else 1
    update = parameters / shards * c.optimizer_bytes / device.memory_bandwidth
    return {
        "compute": m * per_stage * kernels,
        "tensor": m * per_stage * comm,
        "launch": m * per_stage * (layer - kernels - comm),
        "head": steady - m * stage,
        "bubble": bubble,
        "pipeline": pipe,
        "gradients": gradients,
        "optimizer": update + c.step,
    }


def _matmul_seconds(
    work: LayerWork, run: TrainingRun, peak: float, c: StepConstants
) -> tuple[float, float]:
    """Return (projections, attention products) in seconds of one forward pass of one layer."""
    units = run.cluster.host_groups[0].device.num_units
    matmul = 0.0
    for product in work.matmuls:
        if product.kind == "matmul":
            matmul += product.flops / (peak * c.matmul_share * _shape_share(product, units, c))
    share = c.fused_attention_share if run.fused_attention else c.attention_share
    return matmul, work.attention_flops / (peak * share)


def _shape_share(product: Matmul, units: int, c: StepConstants) -> float:
    shape = (int(product.m), int(product.n), int(product.k))
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
    axis = axes["tensor"]
    seconds = collective_seconds("all-reduce", work.hidden_bytes, (axis,))
    return c.tensor_latency + seconds / c.tensor_bandwidth, 4


def _context_ring(run: TrainingRun, axes: Mapping[str, MeshAxis], c: StepConstants) -> float:
    """Return the exposed seconds of passing key-value blocks around in one forward of a layer."""
    if run.context == 1:
        return 0.0
    model = run.model
    kv = (model.qkv_width - model.attention_width) / run.tensor
    size = 2.0 * run.micro_batch * model.seq * kv
    seconds = collective_seconds("all-gather", size, (axes["context"],))
    return c.context_exposed * float(seconds)


def _edge_seconds(
    run: TrainingRun, peak: float, bandwidth: float, c: StepConstants
) -> tuple[float, float]:
    """Return seconds per microbatch that the first and the last stage have more than the others."""
    model = run.model
    tokens = run.micro_batch * model.seq / run.context
    columns = model.vocab / run.tensor
    product = Matmul(kind="matmul", batch=1, m=tokens, n=columns, k=model.hidden)
    units = run.cluster.host_groups[0].device.num_units
    matmul = 3 * product.flops / (peak * c.matmul_share * _shape_share(product, units, c))
    # logits: written in half precision, loss read and written in single, several passes
    logits = tokens * columns * 28 / bandwidth
    table = columns * model.hidden * 8 / bandwidth  # gradient of the table: zeroed, added
    embedding = c.embedding * tokens * model.hidden / run.tensor + table
    return embedding, c.head * (matmul + logits) + table


def _gradient_seconds(
    run: TrainingRun, parameters: float, axes: Mapping[str, MeshAxis], c: StepConstants
) -> float:
    group = run.data * run.context
    if group == 1:
        return 0.0
    used = tuple(axes[name] for name in ("data", "context"))
    seconds = collective_seconds("all-reduce", 2.0 * parameters, used)
    latency = c.gradient_latency * math.log2(group)
    return c.gradient_exposed * float(seconds) / c.gradient_bandwidth + latency
