"""What a planner's kernels and collectives cost when another program than ours runs them.

A cluster's name may say which training program its steps run under, behind a plus sign:

    h100:64+nanotron                       with what nanotron does by itself
    selene:8+megatron-deepspeed,flash      and FlashAttention (`PROPERTIES`)

`CostModel` then prices by the constants of that executor (`step_fit`), those that `predict` uses:

    kernel       roofline with the executor's shares                            -> compute_seconds
    attention    fused: the share of FlashAttention, with half of the products skipped; score
                 matrices move nothing (`attends`)
    collective   inside a layer: the share of the links that tensor parallelism reaches, and a
                 latency more                                                -> collective_seconds
    buckets      the share that gradients reach, and of that what is exposed    -> exposed_share
    transfers    between stages: their latency and share of the links           -> transfer_links
    host         what every stage takes beside layers, per microbatch       -> microbatch_seconds
                 and per step                                               -> step_seconds

The host launches kernel by kernel, and runs ahead while a large one runs: both passes of a layer
take the sum of its kernels and collectives or the sum of their launches, whichever is more, as
`predict` has it (`step_layers`).                     -> launch, launch_seconds, passes_seconds
Collectives that run beside products (those of nanotron's layers, gradients beside the last backward
pass) count for the share of them that is exposed at least. The program's schedule is not a kernel's
cost and stays the planner's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from attrs import evolve, field, frozen

from alpa_interchange.cluster import ClusterSpec, HostGroup
from cost_model.executor import EXECUTORS
from cost_model.kernel import KernelEfficiency, matmul_share
from cost_model.prediction import step_model
from cost_model.step_constants import StepConstants
from cost_model.step_layers import launched_seconds
from cost_model.topology import TransferLinks
from cost_model.training_run import TrainingRun

PROPERTIES = ("flash", "fused", "staged")
"""FlashAttention; bias, dropout and mask fused into few kernels; stages on several hosts. `fold2`
beside them are the constants fitted without the second fold, to judge its rows by."""

# products of a layer in both passes: four of weights and two of attention, and twice as many
# backward. Launches of a layer were measured as one number, whatever its norms and activations are
# traced as: 62 to 99 kernels
_PRODUCTS = 18.0
# collectives of tensor parallelism per layer and microbatch: all-reduces, or twice as many halves
_ALL_REDUCES = 4.0
_PRODUCT_KINDS = ("matmul", "convolution", "attention")
_CAUSAL = 0.5  # of the products that fused attention computes

_MARK = re.compile(r"(?P<cluster>.+)\+(?P<executor>[a-z][a-z0-9-]*)(?P<properties>(,[a-z]+\d*)*)")
_FOLD = re.compile(r"fold(\d)")


@frozen(kw_only=True)
class Program:
    """A training program as a planner's costs know it."""

    executor: str
    properties: frozenset[str]
    constants: StepConstants = field(repr=False)

    @property
    def attends(self) -> bool:
        """Return whether attention is one kernel that keeps its score matrices to itself."""
        return "flash" in self.properties

    @property
    def launch(self) -> float:
        """Return the seconds that the host takes to launch a product and what comes with it."""
        return 0.0 if EXECUTORS[self.executor].compiled else self.constants.launch / _PRODUCTS

    def efficiency(self) -> KernelEfficiency:
        """Return the shares of a device's peaks that the program's kernels reach."""
        c, plain = self.constants, KernelEfficiency()
        attention = c.fused_attention_share / _CAUSAL if self.attends else c.attention_share
        # products move what they do, whatever kernels are not fused between them
        share = c.memory_share / (1.0 if "fused" in self.properties else c.unfused_memory)
        products = dict.fromkeys(_PRODUCT_KINDS, c.memory_share)
        return KernelEfficiency(
            compute={"matmul": c.matmul_share, "convolution": c.matmul_share,
                     "attention": attention},
            memory=dict.fromkeys(plain.memory, share) | products,
            half_bytes=0.0,
            half_depth=c.half_depth,
            source=f"training runs under {self.executor}",
        )  # fmt: skip

    def product_share(self, shape: tuple[int, ...], num_units: int) -> float:
        """Return the share of its best rate that a product ([batch,] m, n, k) reaches."""
        c = self.constants
        fill = matmul_share(shape, num_units, KernelEfficiency(half_depth=c.half_depth))
        return fill * shape[-2] / (shape[-2] + c.half_columns)

    def launch_seconds(self, kind: str, size: int) -> float:
        """Return the seconds that the host takes to launch a collective of `size` devices."""
        c = self.constants
        if EXECUTORS[self.executor].compiled or size == 1:
            return 0.0
        layer = c.launch_collective + c.launch_group * (math.log2(size) - 1)
        if "staged" in self.properties:
            layer += c.launch_staged * size
        return layer / _collectives(kind)

    def collective_seconds(self, kind: str, start: Any, moved: Any, far: bool = False) -> Any:
        """Return the seconds of devices for a collective inside a layer that takes `moved` on idle
        links, and `start` with one byte: what products beside it do not hide, where they run so.

        A `far` one, between hosts, counts in full: it takes longer than the products beside it.
        """
        c = self.constants
        fixed = c.tensor_latency * _ALL_REDUCES / _collectives(kind) + start / c.tensor_bandwidth
        hidden = EXECUTORS[self.executor].overlapped_tensor and not far
        exposed = c.tensor_exposed if hidden else 1.0
        return fixed + exposed * (moved - start) / c.tensor_bandwidth

    def exposed_share(self, kind: str) -> float:
        """Return the seconds of collectives that reduce gradients, or scatter and gather what is
        sharded, by those on idle links: the share of the links reached, less what the backward pass
        hides (`step_terms`)."""
        c, executor = self.constants, EXECUTORS[self.executor]
        if kind == "reduce-scatter":
            overlapped = 1 in executor.overlapped_gradients
        else:
            overlapped = kind == "all-reduce" or executor.gathers_ahead
        return (c.gradient_exposed if overlapped else c.sharded_exposed) / c.gradient_bandwidth

    @property
    def microbatch_seconds(self) -> tuple[float, float]:
        """Return the seconds that a stage takes beside its layers for each microbatch, forward and
        backward: twice as many there, as its kernels; none in a compiled program."""
        whole = 0.0 if EXECUTORS[self.executor].compiled else self.constants.microbatch
        return whole / 3, whole * 2 / 3

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step beside its microbatches and updates, likewise."""
        return 0.0 if EXECUTORS[self.executor].compiled else self.constants.step

    def transfer_links(self, links: TransferLinks) -> TransferLinks:
        """Return what a transfer between stages passes through, with the latency and the share of
        the bandwidth that the program's transfers have."""
        c = self.constants
        hosts = links.hosts
        if hosts is not None:  # whose links have the share of collectives already (`_links`)
            share = c.pipeline_bandwidth / c.fabric_bandwidth
            hosts = hosts[0] * share, hosts[1] * share
        ports = links.devices
        return evolve(
            links,
            latency=c.pipeline_latency,
            devices=(ports[0] * c.pipeline_bandwidth, ports[1] * c.pipeline_bandwidth),
            hosts=hosts,
        )

    def passes_seconds(self, busy: Any, host: Any) -> Any:
        """Return the seconds of both passes of a layer whose devices are `busy` for as many and
        whose launches take the `host` as many as that, numbers or equal arrays."""
        return launched_seconds(busy, host, self.constants.sharpness)

    def device_share(self, slowed: Any) -> Any:
        """Return by how much `passes_seconds` grow with the seconds of devices, where they are
        `slowed` times these: 1 without launches, less the more of them there are."""
        return slowed ** (1.0 - self.constants.sharpness)


def _collectives(kind: str) -> float:
    return _ALL_REDUCES * (1.0 if kind == "all-reduce" else 2.0)


def as_run_by(
    cluster: ClusterSpec,
    executor: str,
    properties: Collection[str] = (),
) -> ClusterSpec:
    """Return `cluster` with its links as `executor` uses them, and the name that says so."""
    if executor not in EXECUTORS:
        raise ValueError(f"executor must be one of {', '.join(EXECUTORS)}, got {executor!r}")
    stated = sorted(set(properties), key=lambda name: (*PROPERTIES, name).index(name))
    unknown = [name for name in stated if name not in PROPERTIES and not _FOLD.fullmatch(name)]
    if unknown:
        raise ValueError(
            f"properties of an executor must be of {', '.join(PROPERTIES)}, got {unknown[0]!r}"
        )
    if _MARK.fullmatch(cluster.name):
        raise ValueError(f"cluster {cluster.name!r} has an executor already")
    c = _constants(executor, stated)
    mark = ",".join((executor, *stated))
    groups = tuple(_links(group, c) for group in cluster.host_groups)
    return evolve(cluster, name=f"{cluster.name}+{mark}", host_groups=groups)


def cluster_of_run(run: TrainingRun, fold: int | None = None) -> ClusterSpec:
    """Return the cluster of a training run as its executor uses it, by the constants fitted without
    `fold` where that is given."""
    staged = run.pipeline > 1 and run.cluster.host_groups[0].num_hosts > 1
    stated = {"flash": run.fused_attention, "fused": run.fused_elementwise, "staged": staged}
    properties = [name for name, holds in stated.items() if holds]
    properties += [] if fold is None else [f"fold{fold}"]
    return as_run_by(run.cluster, run.executor, properties)


def program_of(cluster: ClusterSpec) -> Program | None:
    """Return the program that the name of a cluster states, None where it states none."""
    found = _MARK.fullmatch(cluster.name)
    if found is None or found["executor"] not in EXECUTORS:
        return None
    properties = found["properties"].split(",")[1:]
    return Program(
        executor=found["executor"],
        properties=frozenset(properties),
        constants=_constants(found["executor"], properties),
    )


def _constants(executor: str, properties: Collection[str]) -> StepConstants:
    model = step_model(executor)
    for fold in filter(None, map(_FOLD.fullmatch, properties)):
        return model.folds[int(fold[1])].constants
    return model.whole.constants


def _links(group: HostGroup, c: StepConstants) -> HostGroup:
    between = group.inter_host
    return evolve(
        group,
        inter_host=evolve(
            between,
            bandwidth=between.bandwidth * c.fabric_bandwidth,
            latency=between.latency * c.fabric_latency,
        ),
    )
