"""Collectives that travel together: which those are, and what their buckets cost.

Completions of gradients, conversions of state before its use, and everything in the update depend
on no other collective in between, so they are sent in buckets (`spmd.bucketing`; XLA's combiners):
a bucket costs one latency, not one per tensor. A selection problem is a sum over nodes and edges,
which has no place for a cost shared by many, hence two prices:

    in the problem     a tensor's share of a full bucket                  -> MeshCosts.bucketed
                       its part of a bucket of sums that arise together   -> sums_together()
    of the solution    the buckets of each kind and mesh axes, per phase  -> BucketedTraffic.extra()

The first is never above the second, so a lower bound of the problem bounds the plan. A search is
led to choices of few buckets by problems with other prices                 -> repriced()
Approximations: members of a bucket are taken to be ready together, dtypes to travel together, and
loops not to be unrolled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from alpa_interchange import LogicalMesh, ShardingProblem, ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import Jaxpr, JaxprEqn, Literal, Var, array_type, is_drop, subjaxprs
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.added_costs import with_added
from alpa_meta.intra_op.layouts import layouts_of
from alpa_meta.intra_op.mesh_costs import Completed, Conversion, MeshCosts
from alpa_meta.intra_op.stage_problem import Source, StageEqns
from alpa_meta.operators import operator_of
from alpa_meta.program_caches import cached_by_program
from alpa_meta.spmd import HOST_BUCKETS
from alpa_meta.types import Floats
from ilp_sharding.strategies import FREE

Sent = tuple[str, float, tuple[str, ...]]
"""A collective: kind, bytes of the larger side on one device, mesh axes."""

Sizes = Mapping[float, int]
"""How many tensors of each number of bytes."""


@cached_by_program(16)  # stages are on many meshes
def late_values(stage: StageEqns, heavy: Callable[[JaxprEqn], bool]) -> frozenset[Var]:
    """Return the values of the microbatches that nothing but the update and the result waits for.

    Directly, or through equations of the backward pass whose results are such values and which are
    not `heavy`: a contraction waits for its operands, so that the backward pass goes on.
    """
    before_update = [
        (eqn, phase)
        for eqn, phase in zip(stage.eqns, stage.phases, strict=True)
        if phase != "update"
    ]
    return _late(before_update, set(), heavy)


def late_in_body(
    jaxpr: Jaxpr, late: Collection[int], phase: str, heavy: Callable[[JaxprEqn], bool]
) -> frozenset[Var]:
    """Return the values of a recomputation that only its `late` outputs, by number, wait for."""
    waited_for = {
        atom
        for number, atom in enumerate(jaxpr.outvars)
        if number not in late and not isinstance(atom, Literal)
    }
    return _late([(eqn, phase) for eqn in jaxpr.eqns], waited_for, heavy)


def _late(
    eqns: Sequence[tuple[JaxprEqn, str]], waited_for: set[Var], heavy: Callable[[JaxprEqn], bool]
) -> frozenset[Var]:
    late: set[Var] = set()
    for eqn, phase in reversed(eqns):
        outputs = [var for var in eqn.outvars if not is_drop(var)]
        found = [var for var in outputs if var not in waited_for]
        late.update(found)
        waits = heavy(eqn) or bool(subjaxprs(eqn)) or phase == "forward"
        if waits or len(found) < len(outputs):
            waited_for.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return frozenset(late)


@cached_by_program(16)  # stages are on many meshes
def sums_together(stage: StageEqns, heavy: Callable[[JaxprEqn], bool]) -> Mapping[JaxprEqn, int]:
    """Return, by equation, how many small sums are sent with its own, itself included.

    A light equation's sums wait for as many sums and `heavy` equations, one after the other, as
    those of another (mean and mean square, say): then neither waits for the other, and where both
    follow operands of one shape, their sums are over the same axes.
    """
    depth: dict[Var, int] = {}
    rounds: dict[Hashable, list[JaxprEqn]] = {}
    for eqn, phase in zip(stage.eqns, stage.phases, strict=True):
        now = max((depth.get(a, 0) for a in eqn.invars if not isinstance(a, Literal)), default=0)
        waits = heavy(eqn) or bool(subjaxprs(eqn))
        if not waits and operator_of(eqn).liveness == "reduced":
            waits = True
            if all(tensor_bytes(var) <= HOST_BUCKETS.tensor for var in eqn.outvars):
                operand = array_type(eqn.invars[0])
                key = (phase, now, eqn.primitive.name, operand.shape, operand.dtype)
                rounds.setdefault(key, []).append(eqn)
        depth.update((var, now + waits) for var in eqn.outvars if not is_drop(var))
    return {one: len(members) for members in rounds.values() for one in members}


def completion_steps(
    mesh: LogicalMesh, bytes: float, natural: ShardingSpec, final: ShardingSpec
) -> Iterator[Sent]:
    """Yield what completes partial sums of a tensor of `bytes` in all, from one spec to another."""
    for kind, parts, axes in layouts_of(mesh).completion_steps(natural, final):
        yield kind, bytes / parts, axes


def conversion_steps(
    costs: MeshCosts, source: Source, here: ShardingSpec, there: ShardingSpec, in_buckets: bool
) -> Iterator[Sent]:
    """Yield the collectives that turn a value from one spec into another."""
    mesh = costs.mesh
    local = source.bytes / mesh.size(tuple(axis for dim in here.dims for axis in dim))
    conversions = costs.bucketed if in_buckets else costs.conversions
    for step in conversions.steps(source.shape, source.bytes, here, there):
        size = mesh.size(step.axes)
        if step.kind == "all-gather":
            local *= size
        if step.kind not in FREE:
            yield step.kind, local, step.axes
        if step.kind in ("slice", "reduce-scatter"):
            local /= size


def own_sums(
    eqn: JaxprEqn, rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh
) -> Iterator[Sent]:
    """Yield the all-reduces of sums that an operator does not leave partial."""
    for number, parts, axes in layouts_of(mesh).own_sums_of(rule, strategy):
        yield "all-reduce", tensor_bytes(eqn.outvars[number]) / parts, axes


def surplus(priced: Floats, shared: Floats) -> Floats:
    """Return by how much `priced` exceeds `shared`, 0 where both are impossible."""
    with np.errstate(invalid="ignore"):
        found: Floats = np.nan_to_num(np.maximum(priced - shared, 0.0), nan=0.0, posinf=0.0)
    return found


@frozen(kw_only=True)
class Group:
    """Collectives that share buckets: they run `times` a step in one phase."""

    phase: str
    times: float
    kind: str
    axes: tuple[str, ...]  # sorted


@frozen(eq=False)
class PricedCosts(MeshCosts):
    """Costs by which a tensor in a bucket pays, beside its share, by the byte; without a price for
    its kind and sorted axes, as much as alone."""

    prices: Mapping[tuple[str, tuple[str, ...]], float] = field(factory=dict, kw_only=True)

    def bucket_share_seconds(self, kind: str, bytes: float, axes: tuple[str, ...]) -> float:
        alone = self.collective_seconds(kind, bytes, axes)
        price = self.prices.get((kind, tuple(sorted(axes))))
        if price is None:
            return alone
        return min(alone, super().bucket_share_seconds(kind, bytes, axes) + price * bytes)


@define(eq=False)
class _Surcharge:
    """What sending a tensor costs by shares and in buckets of other costs, for `count` equal
    ones."""

    run: tuple[str, float]  # phase, times
    first: int
    second: int
    shared: Floats
    priced: Callable[[MeshCosts], Floats]
    count: int = 0


@frozen(eq=False)
class _Entry:
    """`count` equal tensors that are sent `times` a step in `phase`: `sent` names the collectives
    of one under the strategies of two nodes, of which each pair is asked for once."""

    phase: str
    times: float
    count: int
    first: int
    second: int
    sent: Callable[[int, int], Iterator[Sent]]
    _known: dict[tuple[int, int], list[tuple[Group, float]]] = field(factory=dict)

    def groups(self, choice: Sequence[int], mesh: LogicalMesh) -> list[tuple[Group, float]]:
        """Return the groups and bytes of what one tensor sends under a choice."""
        pair = choice[self.first], choice[self.second]
        known = self._known.get(pair)
        if known is None:
            known = self._known[pair] = []
            for kind, size, names in self.sent(*pair):
                if size > 0 and mesh.size(names) > 1:
                    axes = tuple(sorted(names))
                    group = Group(phase=self.phase, times=self.times, kind=kind, axes=axes)
                    known.append((group, size))
        return known


@frozen(eq=False)
class BucketedTraffic:
    """Every collective priced by its share of a bucket, as a function of the choice."""

    costs: MeshCosts
    _entries: list[_Entry] = field(factory=list)
    _surcharges: dict[Hashable, _Surcharge] = field(factory=dict)
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
        nodes: tuple[int, int],
        sent: Callable[[int, int], Iterator[Sent]],
        count: int = 1,
    ) -> None:
        """Note collectives of `count` tensors of `bytes` that run `times` a step in `phase`; `sent`
        names those of one for the strategies of two nodes."""
        self._entries.append(_Entry(phase, times, count, *nodes, sent))
        self._bytes.append(bytes * count)

    def surcharge(
        self,
        phase: str,
        times: float,
        first: int,
        second: int,
        of: Conversion | Completed,
        shared: Floats,
        priced: Callable[[MeshCosts], Floats],
        count: int = 1,
    ) -> None:
        """Note [first, second] seconds of sending a tensor by its share of a bucket, `shared`, and
        in buckets of other costs, each of the `times`, for `count` tensors. Both are the same for
        all tensors `of` one conversion or completion.
        """
        key = (phase, times, first, second, of)
        if key not in self._surcharges:
            self._surcharges[key] = _Surcharge((phase, times), first, second, shared, priced)
        self._surcharges[key].count += count

    def repriced(
        self, problem: ShardingProblem, prices: Mapping[Group, float] | None = None
    ) -> ShardingProblem:
        """Return `problem` with every noted tensor paying `prices`, seconds per byte, beside its
        share; as much as sent alone where its group has no price."""
        by_run: dict[tuple[str, float], dict[tuple[str, tuple[str, ...]], float]] = {}
        for group, price in (prices or {}).items():
            by_run.setdefault((group.phase, group.times), {})[group.kind, group.axes] = price
        costs = {
            run: PricedCosts(
                self.costs.mesh, self.costs.model, self.costs.host_group, prices=by_run.get(run, {})
            )
            for run in {one.run for one in self._surcharges.values()}
        }
        return with_added(
            problem,
            (
                (
                    one.first,
                    one.second,
                    one.count * one.run[1] * surplus(one.priced(costs[one.run]), one.shared),
                )
                for one in self._surcharges.values()
            ),
        )

    def conversion(
        self,
        phase: str,
        times: float,
        source: Source,
        node: int,
        wanted: Sequence[ShardingSpec],
        count: int = 1,
    ) -> None:
        """Note the conversion of a value into the spec that `node` wants."""

        costs = self.costs  # not this traffic, which would live as long as its entries

        def sent(first: int, second: int) -> Iterator[Sent]:
            here, there = source.specs[first], wanted[second]
            return conversion_steps(costs, source, here, there, in_buckets=True)

        assert source.node is not None
        self.add(phase, times, source.bytes, (source.node, node), sent, count)

    def sums(
        self,
        phase: str,
        times: float,
        natural: Source,
        node: int,
        finals: Sequence[ShardingSpec],
        count: int = 1,
    ) -> None:
        """Note the completion of partial sums into the spec chosen at `node`."""

        mesh = self.costs.mesh

        def sent(first: int, second: int) -> Iterator[Sent]:
            before, after = natural.specs[first], finals[second]
            return completion_steps(mesh, natural.bytes, before, after)

        assert natural.node is not None
        self.add(phase, times, natural.bytes, (natural.node, node), sent, count)

    def groups(self, choice: Sequence[int]) -> Mapping[Group, Sizes]:
        """Return how many tensors of each number of bytes a choice sends in buckets."""
        found: dict[Group, dict[float, int]] = {}
        for entry in self._entries:
            for group, size in entry.groups(choice, self.costs.mesh):
                sizes = found.setdefault(group, {})
                sizes[size] = sizes.get(size, 0) + entry.count
        return found

    def beyond_shares(self, group: Group, sizes: Sizes) -> float:
        """Return the seconds by which the buckets of a group exceed the shares, each time."""
        kind, axes = group.kind, group.axes
        shares = math.fsum(
            count * self.costs.bucket_share_seconds(kind, size, axes)
            for size, count in sizes.items()
        )
        return max(self.costs.bucketed_seconds(kind, sizes, axes) - shares, 0.0)

    def extra(self, choice: Sequence[int]) -> Mapping[str, float]:
        """Return, by phase, the seconds per step by which the buckets exceed the shares."""
        found: dict[str, float] = {}
        for group, sizes in self.groups(choice).items():
            more = group.times * self.beyond_shares(group, sizes)
            found[group.phase] = found.get(group.phase, 0.0) + more
        return found
