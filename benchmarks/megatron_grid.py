"""The best plan of Megatron's grid for a published model, in the planner's cost model.

    .venv/bin/python benchmarks/megatron_grid.py gpt-2.6b p3.16xlarge:8

Every point is data x tensor x pipeline parallelism x samples per microbatch x recomputation of
none or all layers x ZeRO-1 or ZeRO-3. Its inputs are pinned as Megatron shards them
(`alpa_meta.presets`) and the planner's solver chooses the rest; the search over stages is not used.
Layers are taken from a model with few of them: an inner one is counted as often as the
whole model has it.
Stages are consecutive layers, the slowest as fast as it can be; their step is what the event
simulator says (`stage_dp.step_seconds`, 1F1B), their memory what 1F1B keeps in flight. Measured
runs (`cost_traced`) are cut where that step is shortest: a whole grid so, that of LLaMA-70B on 64
H100, had no end after 40 CPU minutes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

import stage_dp
from alpa_interchange import LogicalMesh, StageCandidate, SubmeshSpec
from alpa_meta.corpus import published
from alpa_meta.inter_op.candidates import Outlook, beside_layers
from alpa_meta.inter_op.layer_costs import LayerCosts
from alpa_meta.inter_op.meshes import usable_memory
from alpa_meta.inter_op.stage_costs import StageCosts
from alpa_meta.inter_op.stage_selection import boundary_bytes, stage_scope
from alpa_meta.intra_op.bucketed_solution import solve_in_buckets
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.model_dims import model_dims
from alpa_meta.options import Options
from alpa_meta.pinning import Pin, pinned_inputs
from alpa_meta.planning.collection_pause import collections_paused
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.presets import preset_pins
from alpa_meta.published_models import PUBLISHED
from alpa_meta.step.program import Program, Step
from alpa_meta.types import Spec
from cost_model import CostModel, calibrated_model, cluster

MOST_TENSOR = 16  # Megatron keeps tensor parallelism inside a host; larger is never best
Axes = tuple[int, int]
"""Devices of data and of tensor parallelism."""


@frozen(kw_only=True)
class Few:
    """A model with few layers: each `inner` one (none named: that in the middle) stands for
    `repeats` of the whole model.

    `num_layers` is the number of layers it is clustered into, None where the clustering chooses:
    a block each, and what is outside of them apart where it weighs half a block.
    """

    sizes: dict[str, Any]
    repeats: int
    num_layers: int | None = None
    inner: tuple[int, ...] = ()

    def times(self, num_layers: int) -> np.ndarray:
        """Return how many layers of the whole model each layer stands for."""
        found = np.ones(num_layers, dtype=int)
        # the last block may hold the last norm
        found[list(self.inner or ((num_layers - 1) // 2,))] = self.repeats
        return found


def few_layers(name: str, changed: dict[str, Any]) -> Few:
    """Return the model with three periods of its blocks, of an encoder and a decoder three of each;
    a ResNet or Swin, whose blocks differ, whole."""
    record = PUBLISHED[name]
    shape = {**record.shape, **changed}
    if record.program in ("bottleneck_resnet", "swin"):
        blocks = shape.get("blocks") or shape["depths"]
        return Few(sizes=changed, repeats=1, num_layers=sum(blocks))
    period = 2 if shape.get("num_experts") and record.program == "transformer" else 1
    periods = shape["num_layers"] // period
    inner = (1, 4) if record.program == "t5" else ()
    return Few(sizes={**changed, "num_layers": 3 * period}, repeats=periods - 2, inner=inner)


@frozen(kw_only=True)
class Point:
    """One point of the grid: devices per stage's data and tensor axis, microbatches, its cost."""

    pipeline: int
    data: int
    tensor: int
    num_microbatches: int
    recompute: str  # of which part of every layer: none, selective or full
    zero: int
    seconds: float
    peak_bytes: float

    def __str__(self) -> str:
        again = "" if self.recompute == "none" else f", recomputation {self.recompute}"
        return (
            f"pp{self.pipeline} dp{self.data} tp{self.tensor}, {self.num_microbatches} "
            f"microbatches, ZeRO-{self.zero}{again}"
        )


@frozen(kw_only=True)
class _Layers:
    """Seconds of a microbatch and bytes of every layer of the whole model on one mesh."""

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    state: np.ndarray
    activations: np.ndarray
    transient: np.ndarray
    crossing: np.ndarray  # in all, to the next layer


@frozen(eq=False)
class Grid:
    """The grid of one model on one cluster."""

    name: str
    model: CostModel
    few: Few
    step: Step
    batch: int
    exact: bool
    memory: float | None = None
    outlooks: dict[int, Outlook] = field(factory=dict)

    @classmethod
    def of(cls, name: str, devices: Any, **changed: Any) -> Grid:
        """Return the grid of a published model on a cluster (a name or a specification)."""
        few = few_layers(name, changed)
        model = published(name, **few.sizes)
        described = cluster(devices) if isinstance(devices, str) else devices
        step = Step(model.train_step, (model.state, model.batch), exact=model.exact)
        batch: Any = changed.get("batch", PUBLISHED[name].shape["batch"])
        return cls(name, calibrated_model(described), few, step, batch, model.exact)

    def points(self) -> Iterator[Point]:
        """Yield the points that fit in memory, of every mesh and microbatch size."""
        devices = self.model.cluster.num_devices
        stages = self.few.times(self._outlook(self.batch)[1].num_layers).sum()
        for tensor, data in itertools.product(_powers(devices), repeat=2):
            if devices % (tensor * data) or devices // (tensor * data) > stages:
                continue
            if tensor > min(MOST_TENSOR, self._per_host):
                continue
            for zero in (1, 3) if data > 1 else (1,):
                yield from self._of_mesh(tensor, data, zero)

    def num_layers(self, count: int) -> int:
        """Return the number of layers of the whole model in `count` microbatches."""
        return int(self.few.times(self._outlook(count)[1].num_layers).sum())

    @property
    def _per_host(self) -> int:
        return min(group.devices_per_host for group in self.model.cluster.host_groups)

    def _of_mesh(self, tensor: int, data: int, zero: int) -> Iterator[Point]:
        samples = 1
        while self.batch % (data * samples) == 0:
            found = list(self.points_of(tensor, data, zero, self.batch // (data * samples)))
            yield from found
            if not found:
                return  # more samples in a microbatch need more memory
            samples *= 2

    def points_of(
        self,
        tensor: int,
        data: int,
        zero: int,
        count: int,
        preset: str | None = None,
        kinds: Sequence[str] = ("none", "full"),
        pins: Mapping[str, Spec] | None = None,
        cuts: Sequence[int] | None = None,
    ) -> Iterator[Point]:
        """Yield the points that fit of one mesh and number of microbatches, one of each kind of
        recomputation; a `preset` shards in place of Megatron's pins under ZeRO, but for the `pins`
        of inputs by path, and its stages are cut at `cuts`, where none are given for the least
        step, not for the least slowest stage."""
        pipeline = self.model.cluster.num_devices // (tensor * data)
        groups = self._groups(pipeline, tensor * data)
        if groups is None:
            return
        costs = {
            group: self.layers(tensor, data, zero, count, group, preset, kinds, pins)
            for group in set(groups)
        }
        for kind in kinds if all(costs.values()) else ():
            tables = [costs[group][kind] for group in groups]
            stages = self._stages(tables, groups, tensor, data, count, preset is not None, cuts)
            flying = stage_dp.in_flight_counts(stages, "1f1b")
            peaks = [stage_dp.peak_bytes(s, f) for s, f in zip(stages, flying, strict=True)]
            limits = [usable_memory(self.model.cluster, g, self.memory) for g in groups]
            if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
                yield Point(
                    pipeline=pipeline,
                    data=data,
                    tensor=tensor,
                    num_microbatches=count,
                    recompute=kind,
                    zero=zero,
                    seconds=stage_dp.step_seconds(stages, "1f1b"),
                    peak_bytes=max(peaks),
                )

    def _groups(self, pipeline: int, devices: int) -> list[int] | None:
        """Return the host group of each stage, None where a stage would need two."""
        owners = [
            number
            for number, group in enumerate(self.model.cluster.host_groups)
            for _ in range(group.num_hosts * group.devices_per_host)
        ]
        found = [set(owners[k * devices : (k + 1) * devices]) for k in range(pipeline)]
        return [group.pop() for group in found] if all(len(g) == 1 for g in found) else None

    def layers(
        self,
        tensor: int,
        data: int,
        zero: int,
        count: int,
        group: int,
        preset: str | None = None,
        kinds: Sequence[str] = ("none", "full"),
        fixed: Mapping[str, Spec] | None = None,
    ) -> dict[str, _Layers]:
        """Return what every layer costs on one mesh by kind of recomputation, nothing where the
        solver finds nothing."""
        program, outlook = self._outlook(count)
        per_host = self.model.cluster.host_groups[group].devices_per_host
        devices = tensor * data
        if devices > per_host and devices % per_host:
            return {}
        submesh = SubmeshSpec(
            num_hosts=max(1, devices // per_host),
            devices_per_host=min(devices, per_host),
            host_group=group,
        )
        shape = (data, tensor) if tensor > 1 and data > 1 else (devices,)
        mesh = self.model.logical_mesh(submesh, shape, ("x", "y")[: len(shape)])
        pins = (
            preset_pins(preset, program, mesh)
            if preset
            else _pins(program, mesh, tensor > 1, data > 1, zero)
        ) | pinned_inputs(program, mesh, fixed or {})
        alone = devices == self.model.cluster.num_devices  # one stage: one program does it all
        scope = stage_scope(program, outlook.staging, 0, 1, pins, apart=not alone)
        selection = build(scope.eqns, MeshCosts(mesh, self.model, group), f"{data} x {tensor}")
        found = solve_in_buckets(selection, Options())
        if found.choice is None:
            return {}
        times = self.few.times(outlook.num_layers)
        costs = LayerCosts(scope, selection, outlook.num_layers, sharing=int(times.sum()))
        crossing = boundary_bytes(program, outlook.staging, outlook.num_layers)
        tables = {
            kind: _spread(costs.under(found.choice, kind), crossing, times, count, kind)
            for kind in {"none", *kinds}
        }
        kept = tables["none"]
        # What a layer that runs backward makes anew is alive beside the program's temporaries.
        return {
            kind: evolve(
                table,
                transient=kept.transient + np.maximum(kept.activations - table.activations, 0),
            )
            for kind, table in tables.items()
        }

    def _outlook(self, count: int) -> tuple[Program, Outlook]:
        if count not in self.outlooks:
            program = self.step.program(count)
            outlook, _ = outlook_of(program, Options(), self.model.cluster, self.few.num_layers)
            self.outlooks[count] = outlook
        return self.outlooks[count].program, self.outlooks[count]

    def _stages(
        self,
        tables: Sequence[_Layers],
        groups: Sequence[int],
        tensor: int,
        data: int,
        count: int,
        improve: bool,
        cuts: Sequence[int] | None = None,
    ) -> list[StageCandidate]:
        """Return the stages between `cuts`, or of the cuts with the least time of the slowest
        stage, or with the least step, found from these by giving one layer at a time from a stage
        to another.

        With few microbatches the slowest stage is not all: the first stage's update comes last.
        20 layers cut for it alone on 4 stages with 2 microbatches were 10 % slower than the
        planner's cuts at 3, 10 and 17 (`cost_traced`, vtrain_single-1177), now at most 0.3 %.
        """

        def priced(cuts: Sequence[int]) -> tuple[float, list[StageCandidate]]:
            stages = self._cut(cuts, tables, groups, tensor, data, count)
            return stage_dp.step_seconds(stages, "1f1b"), stages

        if cuts is not None:
            return self._cut(cuts, tables, groups, tensor, data, count)
        cuts = _balanced([table.forward + table.backward for table in tables])
        best, stages = priced(cuts)
        while improve:
            others = [(*priced(other), other) for other in _one_given(cuts)]
            seconds, candidates, other = min(others, key=lambda one: one[0], default=(best, [], []))
            if seconds >= best:
                break
            best, stages, cuts = seconds, candidates, other
        return stages

    def _cut(
        self,
        cuts: Sequence[int],
        tables: Sequence[_Layers],
        groups: Sequence[int],
        tensor: int,
        data: int,
        count: int,
    ) -> list[StageCandidate]:
        """Return the stages between `cuts` [stages + 1]."""
        found, (forth, back, once) = [], beside_layers(self.model)
        for k, (start, stop) in enumerate(itertools.pairwise(cuts)):
            table, part = tables[k], slice(start, stop)
            edge = 0.0
            if k + 1 < len(tables):
                edge = self._crossing_seconds(k, groups, tensor, data, table.crossing[stop - 1])
            submesh = SubmeshSpec(num_hosts=1, devices_per_host=1, host_group=groups[k])
            found.append(
                StageCandidate(
                    layer_start=start,
                    layer_stop=stop,
                    submesh=submesh,
                    logical=self.model.logical_mesh(submesh, (1,), ("x",)),
                    num_microbatches=count,
                    forward_seconds=float(table.forward[part].sum()) + forth,
                    backward_seconds=float(table.backward[part].sum()) + back,
                    step_seconds=float(table.update[part].sum()) + once,
                    state_bytes=float(table.state[part].sum()),
                    activation_bytes=float(table.activations[part].sum()),
                    transient_bytes=float(table.transient[part].max()),
                    boundary_seconds=edge,
                )
            )
        return found

    def _crossing_seconds(
        self, stage: int, groups: Sequence[int], tensor: int, data: int, size: float
    ) -> float:
        """Return the seconds from a stage to the next, over the link between their devices: cut
        over the data-parallel replicas, whole on each of their devices."""
        described = self.model.cluster
        here, there = groups[stage], groups[stage + 1]
        devices, room = tensor * data, described.host_groups[here].devices_per_host
        inside = here == there and devices < room and (stage + 1) * devices % room
        link = "host" if inside else "hosts" if here == there else "groups"
        on_host = min(devices, room)
        source, target = (
            SubmeshSpec(num_hosts=devices // on_host, devices_per_host=on_host, host_group=group)
            for group in (here, there)
        )
        shares = max(1, on_host // tensor) / data, 1 / data
        return float(self.model.transfer_seconds(size, source, target, link, *shares))


def _spread(
    costs: StageCosts, crossing: np.ndarray, times: np.ndarray, count: int, kind: str
) -> _Layers:

    def every(values: np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype=float), times)

    # Layers by their sums, all of them together by what is alive at the peak, as plans are.
    state, gradients, activations, temporaries = costs.peak.bytes
    alive = every(costs.activations)
    if kind == "none":
        alive *= _ratio(activations, costs.activations)
    return _Layers(
        forward=every(costs.forward) / count,
        backward=every(costs.backward) / count,
        update=every(costs.update),
        state=every(costs.state) * _ratio(state, costs.state)
        + every(costs.gradients) * _ratio(gradients, costs.gradients),
        activations=alive,
        transient=np.full(len(alive), temporaries),
        crossing=every(np.where(np.arange(len(crossing)) + 1 < len(crossing), crossing, 0.0)),
    )


def _ratio(alive: float, parts: np.ndarray) -> float:
    return float(alive / parts.sum()) if parts.sum() > 0 else 1.0


def _pins(
    program: Program, mesh: LogicalMesh, tensor: bool, data: bool, zero: int
) -> dict[Any, Pin]:
    """Return the pins of a point: Megatron's weights, and state cut over data parallelism."""
    if not tensor:
        return preset_pins({1: "zero2", 3: "zero3"}[zero] if data else "dp", program, mesh)
    pins = preset_pins("megatron", program, mesh)
    if not data:
        return pins
    cut = preset_pins("2d", program, mesh)
    if zero == 3:
        return cut
    return pins | {var: cut[var] for var in model_dims(program).optimiser if var in cut}


def _balanced(seconds: Sequence[np.ndarray]) -> list[int]:
    """Return cuts [stages + 1] of layers with the least slowest stage; row k is stage k's."""
    layers, stages = len(seconds[0]), len(seconds)
    sums = [np.concatenate([[0.0], np.cumsum(row)]) for row in seconds]
    best = np.full((stages + 1, layers + 1), math.inf)
    best[0, 0] = 0.0
    origin = np.zeros((stages + 1, layers + 1), dtype=int)
    for k in range(1, stages + 1):
        for stop in range(k, layers + 1):
            slowest = np.maximum(best[k - 1, :stop], sums[k - 1][stop] - sums[k - 1][:stop])
            origin[k, stop] = int(slowest.argmin())
            best[k, stop] = slowest[origin[k, stop]]
    cuts = [layers]
    for k in range(stages, 0, -1):
        cuts.append(int(origin[k, cuts[-1]]))
    return cuts[::-1]


def _one_given(cuts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the cuts [stages + 1] with which one stage has given a layer to another."""
    for giver, taker in itertools.permutations(range(len(cuts) - 1), 2):
        if cuts[giver + 1] - cuts[giver] > 1:
            between = range(min(giver, taker) + 1, max(giver, taker) + 1)
            by = -1 if giver < taker else 1
            yield [cut + by if k in between else cut for k, cut in enumerate(cuts)]


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def best_point(grid: Grid) -> Point | None:
    """Return the fastest point that fits, None if none does."""
    with collections_paused():
        return min(grid.points(), key=lambda point: point.seconds, default=None)


def main(name: str, devices: str) -> None:
    """Print the ten fastest points."""
    with collections_paused():
        points = sorted(Grid.of(name, devices).points(), key=lambda point: point.seconds)
    print(f"{name} on {devices}: {len(points)} points fit")
    for point in points[:10]:
        print(f"{point.seconds:10.4g} s {point.peak_bytes / 1e9:6.1f} GB  {point}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ("gpt-350m", "p3.16xlarge:4")))
