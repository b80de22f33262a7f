"""Collectives that travel together: which those are, and what their buckets cost.

Completions of gradients, conversions of state before its use, and everything in the update depend
on no other collective in between, so they are sent in buckets (`spmd.bucketing`; XLA's combiners):
a bucket costs one latency, not one per tensor. A selection problem is a sum over nodes and edges,
which has no place for a cost shared by many, hence two prices:

    in the problem     a tensor's share of a full bucket                  -> MeshCosts.bucketed
    of the solution    the buckets of each kind and mesh axes, per phase  -> BucketedTraffic.extra()

The first is never above the second, so a lower bound of the problem bounds the plan. The plan that
is chosen ignores at most one latency per kind, axes and phase. Approximations: members of a bucket
are taken to be ready together, dtypes to travel together, and loops not to be unrolled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from alpa_interchange import LogicalMesh, ShardingProblem, ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import Literal, is_drop, subjaxprs
from alpa_meta.layering import tensor_bytes
from alpa_meta.mesh_costs import MeshCosts
from alpa_meta.stage_problem import Source, StageEqns

Sent = tuple[str, float, tuple[str, ...]]
"""A collective: kind, bytes of the larger side on one device, mesh axes."""


def late_values(stage: StageEqns, heavy: Callable[[Any], bool]) -> frozenset[Any]:
    """Return the values of the microbatches that nothing but the update and the result waits for.

    Directly, or through equations of the backward pass whose results are such values and which are
    not `heavy`: a contraction waits for its operands, so that the backward pass goes on.
    """
    waited_for: set[Any] = set()
    late: set[Any] = set()
    for eqn, phase in zip(reversed(stage.eqns), reversed(stage.phases), strict=True):
        if phase == "update":
            continue
        outputs = [var for var in eqn.outvars if not is_drop(var)]
        found = [var for var in outputs if var not in waited_for]
        late.update(found)
        waits = heavy(eqn) or bool(subjaxprs(eqn)) or phase == "forward"
        if waits or len(found) < len(outputs):
            waited_for.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return frozenset(late)


def completion_steps(
    mesh: LogicalMesh, bytes: float, natural: ShardingSpec, final: ShardingSpec
) -> Iterator[Sent]:
    """Yield what completes partial sums of a tensor of `bytes` in all, from one spec to another.

    Scattering comes first, because the rest then reduces less.
    """
    local = bytes / mesh.size(tuple(axis for dim in natural.dims for axis in dim))
    scattered = []
    for before, after in zip(natural.dims, final.dims, strict=True):
        for axis in after[len(before) :]:
            yield "reduce-scatter", local, (axis,)
            local /= mesh.size((axis,))
            scattered.append(axis)
    left = tuple(a for a in natural.partial if a not in scattered and a not in final.partial)
    if left:
        yield "all-reduce", local, left


def own_sums(eqn: Any, rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh) -> Iterator[Sent]:
    """Yield the all-reduces of sums that an operator does not leave partial."""
    reduced = [
        axis
        for name, axes in strategy.assignment
        if rule.factor(name).kind == "reduction"
        for axis in axes
    ]
    for var, result in zip(eqn.outvars, strategy.results, strict=True):
        summed = tuple(axis for axis in reduced if axis not in result.partial)
        if summed:
            local = tensor_bytes(var) / mesh.size(tuple(a for dim in result.dims for a in dim))
            yield "all-reduce", local, summed


def surplus(alone: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Return by how much `alone` exceeds `shared`, 0 where both are impossible."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.nan_to_num(np.maximum(alone - shared, 0.0), nan=0.0, posinf=0.0)
    return found


@frozen(eq=False)
class BucketedTraffic:
    """Every collective priced by its share of a bucket, as a function of the choice."""

    costs: MeshCosts
    _entries: list[tuple[str, float, Callable[[Sequence[int]], Iterator[Sent]]]] = field(
        factory=list
    )
    _surcharges: list[tuple[int, int, Callable[[], np.ndarray]]] = field(factory=list)
    _bytes: list[float] = field(factory=list)

    @property
    def most_bytes(self) -> float:
        """Return bytes that no choice sends more of in buckets: three collectives per tensor."""
        return 3.0 * math.fsum(self._bytes)

    def add(
        self,
        phase: str,
        times: float,
        bytes: float,
        sent: Callable[[Sequence[int]], Iterator[Sent]],
    ) -> None:
        """Note collectives of a tensor of `bytes` that run `times` a step in `phase`; `sent` names
        them for a choice."""
        self._entries.append((phase, times, sent))
        self._bytes.append(bytes)

    def surcharge(self, first: int, second: int, seconds: Callable[[], np.ndarray]) -> None:
        """Note [first, second] seconds by which sending a tensor alone exceeds its share."""
        self._surcharges.append((first, second, seconds))

    def alone(self, problem: ShardingProblem) -> ShardingProblem:
        """Return `problem` with every noted tensor sent alone."""
        counts = [int(count) for count in problem.num_strategies]
        nodes = np.concatenate([[0], np.cumsum(counts)])
        sizes = [counts[first] * counts[second] for first, second in problem.edges]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        place = {(int(a), int(b)): int(k) for (a, b), k in zip(problem.edges, starts, strict=False)}
        node_cost, edge_cost = problem.node_cost.copy(), problem.edge_cost.copy()
        for first, second, seconds in self._surcharges:
            more = seconds()
            if first == second:
                node_cost[nodes[first] : nodes[first + 1]] += np.diagonal(more)
                continue
            if first > second:
                first, second, more = second, first, more.T
            start = place[first, second]
            edge_cost[start : start + more.size] += more.ravel()
        return evolve(problem, node_cost=node_cost, edge_cost=edge_cost)

    def conversion(
        self, phase: str, times: float, source: Source, node: int, wanted: Sequence[ShardingSpec]
    ) -> None:
        """Note the conversion of a value into the spec that `node` wants."""

        def sent(choice: Sequence[int]) -> Iterator[Sent]:
            assert source.node is not None
            here, there = source.specs[choice[source.node]], wanted[choice[node]]
            return self._conversion_steps(source, here, there)

        self.add(phase, times, source.bytes, sent)

    def _conversion_steps(
        self, source: Source, here: ShardingSpec, there: ShardingSpec
    ) -> Iterator[Sent]:
        mesh = self.costs.mesh
        local = source.bytes / mesh.size(tuple(axis for dim in here.dims for axis in dim))
        for step in self.costs.bucketed.steps(source.shape, source.bytes, here, there):
            size = mesh.size(step.axes)
            if step.kind == "all-gather":
                local *= size
            if step.kind != "slice":
                yield step.kind, local, step.axes
            if step.kind in ("slice", "reduce-scatter"):
                local /= size

    def sums(
        self, phase: str, times: float, natural: Source, node: int, finals: Sequence[ShardingSpec]
    ) -> None:
        """Note the completion of partial sums into the spec chosen at `node`."""

        def sent(choice: Sequence[int]) -> Iterator[Sent]:
            assert natural.node is not None
            before, after = natural.specs[choice[natural.node]], finals[choice[node]]
            return completion_steps(self.costs.mesh, natural.bytes, before, after)

        self.add(phase, times, natural.bytes, sent)

    def extra(self, choice: Sequence[int]) -> Mapping[str, float]:
        """Return, by phase, the seconds per step by which the buckets exceed the shares."""
        groups: dict[tuple[str, float, str, tuple[str, ...]], list[float]] = {}
        for phase, times, sent in self._entries:
            for kind, size, axes in sent(choice):
                if size > 0 and self.costs.mesh.size(axes) > 1:
                    key = (phase, times, kind, tuple(sorted(axes)))
                    groups.setdefault(key, []).append(size)
        found: dict[str, float] = {}
        for (phase, times, kind, axes), sizes in groups.items():
            shares = math.fsum(self.costs.bucket_share_seconds(kind, s, axes) for s in sizes)
            whole = self.costs.bucketed_seconds(kind, sizes, axes)
            found[phase] = found.get(phase, 0.0) + times * max(whole - shares, 0.0)
        return found
