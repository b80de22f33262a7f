"""Training runs: a transformer, a cluster and a parallel configuration."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen, validators

from alpa_interchange.cluster import ClusterSpec
from cost_model.executor import EXECUTORS, Executor, stages_by_cost
from cost_model.transformer import TransformerSpec

RECOMPUTE = ("none", "selective", "full")
# replicas of such a run up to which all failed; the next that were measured, with 32, ran. Leaving
# out any group of models and devices makes the same rule
_FEW_REPLICAS = 8
LOW_PRECISION: Mapping[str, str] = {  # dtype of a run -> whose peak its matrix products have
    "float8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn",
}  # fmt: skip


@frozen(kw_only=True)
class StagePlacement:
    """One pipeline stage and its replicas, which may be on unlike devices."""

    layers: int
    replicas: tuple[tuple[int, int], ...]  # (host group, tensor-parallel size) of each


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
    expert: int = 1  # devices of one stage that the experts are cut over
    chunks: int = 1  # model chunks per pipeline stage (interleaved schedule)
    stage_layers: tuple[int, ...] = ()  # layers of every stage; none: as the executor cuts them
    placements: tuple[StagePlacement, ...] = ()  # stages on unlike devices; then these count
    recompute: str = field(default="none", validator=validators.in_(RECOMPUTE))
    recompute_share: float = 1.0  # share of the layers that recompute
    sequence_parallel: bool = False
    fused_attention: bool = False  # FlashAttention: no score matrix in memory
    fused_elementwise: bool = False  # bias, dropout, mask and softmax fused into few kernels
    # what data parallelism cuts: 0 nothing, 1 the optimiser, 2 and gradients, 3 and parameters
    zero_stage: int = field(default=0, validator=validators.in_((0, 1, 2, 3)))
    executor: str = field(default="megatron-deepspeed", validator=validators.in_(tuple(EXECUTORS)))
    # of activations; "float8", "mxfp8" and "nvfp4" are those of the layers' matrix products
    dtype: str = "float16"

    def __attrs_post_init__(self) -> None:
        if self.placements:
            self._check_placements()
            return
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
        stage = devices // self.pipeline
        if self.expert > 1 and (
            stage % self.expert or not self.model.experts or self.model.experts % self.expert
        ):
            raise ValueError(
                f"expert must divide the {stage} devices of a stage and the model's "
                f"{self.model.experts} experts, got {self.expert}"
            )
        if self.stage_layers and (
            len(self.stage_layers) != self.pipeline or sum(self.stage_layers) != self.model.layers
        ):
            raise ValueError(
                f"stage_layers must divide {self.model.layers} layers into {self.pipeline} "
                f"stages, got {self.stage_layers}"
            )
        device = self.cluster.host_groups[0].device
        needed = LOW_PRECISION.get(self.dtype)
        if needed is not None and needed not in device.peak_flops:
            raise ValueError(
                f"dtype {self.dtype!r} needs {needed} matrix units, which device {device.name!r} "
                f"does not have; use one of {', '.join(sorted(device.peak_flops))}"
            )

    def _check_placements(self) -> None:
        layers = sum(stage.layers for stage in self.placements)
        if len(self.placements) != self.pipeline or layers != self.model.layers:
            raise ValueError(
                f"placements must divide {self.model.layers} layers into {self.pipeline} stages, "
                f"got {[stage.layers for stage in self.placements]}"
            )
        if any(len(stage.replicas) != self.data for stage in self.placements):
            raise ValueError(f"every stage of placements must have data = {self.data} replicas")
        if self.global_batch % (self.data * self.micro_batch):
            raise ValueError(
                f"global_batch {self.global_batch} must be a multiple of data x micro_batch = "
                f"{self.data} x {self.micro_batch}"
            )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def program(self) -> Executor:
        return EXECUTORS[self.executor]

    @property
    def width_dtype(self) -> str:
        """Return the dtype of what is not a matrix product of a layer."""
        return "bfloat16" if self.dtype in LOW_PRECISION else self.dtype


def stage_layers(run: TrainingRun) -> tuple[float, ...]:
    """Return the layers of every stage, and which stage has the output matrix is the last of them.

    Executors that balance by cost weigh the output matrix against layers; its stage may be
    followed by empty ones, which are left out.
    """
    if run.placements:
        return tuple(float(stage.layers) for stage in run.placements)
    if run.stage_layers:
        return tuple(map(float, run.stage_layers))
    if run.program.balance == "layers" or run.pipeline == 1:
        return (run.model.layers / run.pipeline,) * run.pipeline
    return _stages_by_cost(run.model, run.pipeline)


@functools.lru_cache(maxsize=4096)
def _stages_by_cost(model: TransformerSpec, pipeline: int) -> tuple[float, ...]:
    layer = 4.0 * model.attention_width * model.hidden + 3.0 * model.mlp_width * model.hidden
    places = stages_by_cost([*[layer] * model.layers, float(model.vocab * model.hidden)], pipeline)
    counts = [0.0] * (places[-1] + 1)
    for place in places[:-1]:
        counts[place] += 1.0
    return tuple(counts)


def idle_stages(run: TrainingRun) -> int:
    """Return how many stages the executor leaves without anything to run, which it cannot start.

    Of 90 published nanotron runs with such stages 89 failed.
    """
    return max(0, run.pipeline - len(stage_layers(run)) - run.program.weightless_blocks)


def start_problem(run: TrainingRun) -> str:
    """Return why the executor most likely cannot run this configuration, "" where it can.

    Of 23 nanotron runs with an embedding shared by stages on several hosts and up to 8 replicas
    that add up whole gradients before they reduce them (DDP) all failed, whatever their memory; the
    four with 32 and 64 replicas ran. Of 149 that shard the optimiser 12 failed.
    """
    idle = idle_stages(run)
    if idle:
        return f"{idle} of {run.pipeline} stages stay without a layer"
    hosts = run.cluster.host_groups[0].num_hosts
    few = 1 < run.data <= _FEW_REPLICAS
    replicated = few and run.zero_stage == 0 and run.num_microbatches > 1
    if run.executor == "nanotron" and run.model.tied and run.pipeline > 1 < hosts and replicated:
        return "stages on several hosts share an embedding whose gradients are not sharded"
    return ""


def replica_run(run: TrainingRun, group: int, tensor: int) -> TrainingRun:
    """Return one microbatch of `run` on `tensor` devices of one of its host groups."""
    host = run.cluster.host_groups[group]
    per_host = min(host.devices_per_host, tensor)
    hosts = evolve(host, num_hosts=max(1, tensor // per_host), devices_per_host=per_host)
    return evolve(
        run, placements=(), cluster=ClusterSpec(name=host.device.name, host_groups=(hosts,)),
        global_batch=run.micro_batch, tensor=tensor, data=1, pipeline=1,
    )  # fmt: skip


def uniform_run(run: TrainingRun, group: int, tensor: int) -> TrainingRun:
    """Return `run` with all its stages on devices of one host group, `tensor` per replica."""
    host = run.cluster.host_groups[group]
    hosts = evolve(host, num_hosts=run.data * run.pipeline, devices_per_host=tensor)
    return evolve(
        run, placements=(), stage_layers=tuple(stage.layers for stage in run.placements),
        cluster=ClusterSpec(name=host.device.name, host_groups=(hosts,)), tensor=tensor,
    )  # fmt: skip


def layer_kinds(run: TrainingRun, layers: Sequence[float], stage: int) -> tuple[float, float]:
    """Return how many of a stage's layers are (dense, of experts); the dense ones come first."""
    if not run.model.experts:
        return layers[stage], 0.0
    start = sum(layers[:stage])
    dense = min(max(run.model.dense_layers - start, 0.0), layers[stage])
    return dense, layers[stage] - dense


def held_parameters(run: TrainingRun, layers: Sequence[float], stage: int) -> tuple[float, float]:
    """Return the parameters of a device of `stage`: (all but experts, routed experts)."""
    model = run.model
    dense, sparse = layer_kinds(run, layers, stage)
    plain = dense * model.layer_parameters
    if sparse:
        plain += sparse * model.sparse_layer_parameters
    edges = (stage == 0) + (stage == len(layers) - 1)
    if model.tied and len(layers) == 1:
        edges = 1
    plain += edges * model.vocab * model.hidden
    return plain / run.tensor, sparse * model.expert_parameters / run.expert
