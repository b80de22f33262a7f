"""Intra-operator planning: the equations of a stage as one strategy-selection problem on one mesh.

Nodes: every heavy equation (its strategies come from its sharding rule), and every input and
loop-carried value (its strategies are all sharding specs). A light equation (elementwise, layout)
follows one operand: it shares that operand's node and takes the sharding it finds. Edges: what it
costs to convert a value from the spec its producer leaves it in to the one its reader wants. Costs
are seconds per training step:

    node   compute on one device's part + completing partial sums          -> _Builder._operator()
    edge   cheapest conversion between the two specs                       -> _Builder._convert()
    times  microbatches (forward, backward) or 1 (update), times loop trips

Equations at the same place of layers of the same class share one node (`ProblemBuilder`), and so
does the body of a scan, whose carry enters and leaves with one spec. Memory counts what lives long:
state, gradient accumulators, and activations kept for the backward pass, per microbatch in flight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from alpa_interchange import (
    LogicalMesh,
    ShardingProblem,
    ShardingRule,
    ShardingSolution,
    ShardingSpec,
    Strategy,
    TensorType,
)
from alpa_meta.compat import (
    Literal,
    closed,
    dtype_name,
    is_drop,
    is_remat,
    open_jaxpr,
    scan_counts,
    subjaxprs,
)
from alpa_meta.layering import tensor_bytes
from alpa_meta.pinning import Pin, is_pin, pinned_strategies
from alpa_meta.rules import flops, linear_operands, sharding_rule, traffic_bytes
from alpa_meta.spmd import JaxprPlan, RegionPlan
from cost_model import CostModel
from ilp_sharding.problem_builder import ProblemBuilder
from ilp_sharding.spec_conversion import Conversions, sharding_specs
from ilp_sharding.strategies import completed_specs, natural_strategies, shardable_factors

_MATMULS = {"dot_general": "matmul", "ragged_dot_general": "matmul"}
_REGIONS = ("scan", "while", "cond")
_HEAVY = (
    "dot_general",
    "ragged_dot_general",
    "conv_general_dilated",
    "gather",
    "scatter",
    "random_bits",
    "cumsum",
    "cumlogsumexp",
    "cummax",
    "cumprod",
)


@frozen(eq=False)
class MeshCosts:
    """A logical mesh and what compute and communication cost on it."""

    mesh: LogicalMesh
    model: CostModel
    host_group: int = 0
    while_trips: int = 8  # assumed trips of a while loop, whose true number is not known
    followed: dict[Hashable, tuple[Strategy, ...]] = field(factory=dict, repr=False)
    completed: dict[Hashable, tuple[tuple[ShardingSpec, ...], np.ndarray]] = field(
        factory=dict, repr=False
    )
    _strategies: dict[ShardingRule, tuple[Strategy, ...]] = field(factory=dict, repr=False)
    _matrices: dict[Hashable, np.ndarray] = field(factory=dict, repr=False)

    @functools.cached_property
    def conversions(self) -> Conversions:
        """Return the conversions between specs on this mesh."""
        return Conversions(self.mesh, self.collective_seconds)

    def collective_seconds(self, kind: str, bytes: float, axes: tuple[str, ...]) -> float:
        """Return the seconds of a collective along mesh axes."""
        chosen = tuple(axis for axis in self.mesh.axes if axis.name in axes)
        return float(self.model.collective_seconds(kind, bytes, chosen))

    def strategies(self, rule: ShardingRule) -> tuple[Strategy, ...]:
        """Return all strategies of a rule on the mesh with sums left partial, remembered."""
        if rule not in self._strategies:
            self._strategies[rule] = natural_strategies(rule, self.mesh)
        return self._strategies[rule]

    def conversion_seconds(
        self,
        shape: tuple[int, ...],
        bytes: float,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
    ) -> np.ndarray:
        """Return [sources, targets] seconds of conversion, remembered."""
        key = (shape, bytes, sources, targets)
        if key not in self._matrices:
            rows = {spec: number for number, spec in enumerate(dict.fromkeys(sources))}
            columns = {spec: number for number, spec in enumerate(dict.fromkeys(targets))}
            small = self.conversions.matrix(shape, bytes, list(rows), list(columns))
            self._matrices[key] = small[
                np.ix_([rows[spec] for spec in sources], [columns[spec] for spec in targets])
            ]
        return self._matrices[key]

    def compute_seconds(self, kind: str, flops: float, bytes: float, dtype: str) -> float:
        """Return the seconds of an operator's part on one device.

        Elementwise work is taken as fused into its neighbours: memory traffic without a launch.
        """
        if kind == "elementwise":
            return bytes / self.model.device(self.host_group).memory_bandwidth
        return float(
            self.model.compute_seconds(flops, bytes, dtype, kind, host_group=self.host_group)
        )


@frozen(eq=False)
class Source:
    """Where a value comes from: a node, and the value's spec under each of the node's
    strategies."""

    node: int | None  # None: replicated constants
    specs: tuple[ShardingSpec, ...]
    shape: tuple[int, ...]
    bytes: float

    def inside_loop(self) -> Source:
        """Return the source of one slice along the leading dim."""
        specs = tuple(ShardingSpec(spec.dims[1:], spec.partial) for spec in self.specs)
        count = max(self.shape[0], 1)
        return Source(self.node, specs, self.shape[1:], self.bytes / count)

    def stacked(self, length: int) -> Source:
        """Return the source of `length` of these values stacked along a new leading dim."""
        specs = tuple(ShardingSpec(((), *spec.dims), spec.partial) for spec in self.specs)
        return Source(self.node, specs, (length, *self.shape), self.bytes * length)


@define(eq=False)
class Record:
    """What the problem knows of one equation: its node and strategies, or its region's bodies."""

    node: int | None
    strategies: tuple[Strategy, ...] = ()
    operands: tuple[Source, ...] = ()
    results: tuple[Source, ...] = ()
    bodies: tuple[_Body, ...] = ()
    completed: Source | None = None  # the result after its partial sums were completed


@define(eq=False)
class _Body:
    jaxpr: Any
    inputs: tuple[Source, ...]
    outputs: tuple[Source, ...]
    records: tuple[Record, ...]


@frozen(kw_only=True, eq=False)
class StageEqns:
    """The equations of a layer range, and what surrounds them.

    `keys[k]` folds equation k with those of equal layers (None: alone). `kept_bytes_scale` maps a
    value to how many copies of it live at once (activations in flight); `state` are the inputs that
    live on the devices; `carried` pairs each new state value with the input it replaces.
    """

    eqns: Sequence[Any]
    phases: Sequence[str]
    keys: Sequence[Hashable | None]
    state: frozenset[Any]
    carried: Sequence[tuple[Any, Any]]
    kept: Mapping[Any, float]
    accumulated: frozenset[Any]
    num_microbatches: int
    pins: Mapping[Any, Pin] = field(factory=dict)


@frozen(eq=False)
class Selection:
    """A selection problem together with what its nodes mean."""

    problem: ShardingProblem
    sources: Mapping[Any, Source]
    records: Sequence[Record]
    stage: StageEqns
    costs: MeshCosts
    node_layer_cost: Callable[[Sequence[int]], np.ndarray]
    least_cost: Callable[[], np.ndarray]

    def spec(self, var: Any, choice: Sequence[int]) -> ShardingSpec:
        """Return the sharding spec of `var` under a choice of strategies."""
        source = self.sources.get(var)
        if source is None or source.node is None:
            return ShardingSpec.replicated(len(getattr(var.aval, "shape", ())))
        return source.specs[choice[source.node]]

    def strategy(self, position: int, choice: Sequence[int]) -> Strategy | RegionPlan:
        """Return how equation `position` runs under a choice."""
        return _chosen(self.records[position], choice)


def build(stage: StageEqns, costs: MeshCosts, name: str, memory: float | None = None) -> Selection:
    """Return the selection problem of a stage on a mesh."""
    builder = _Builder(costs, stage)
    records = builder.eqns(stage)
    problem = builder.problem.build(name, memory)
    by_equation, least = builder.costs_by_equation(len(records))
    return Selection(problem, builder.sources, records, stage, costs, by_equation, least)


def _chosen(record: Record, choice: Sequence[int]) -> Strategy | RegionPlan:
    if not record.bodies:
        strategy = record.strategies[choice[record.node] if record.node is not None else 0]
        if record.completed is not None:
            return evolve(strategy, results=(_spec_of(record.completed, choice),))
        return strategy
    bodies = []
    for body in record.bodies:
        inputs = tuple(_spec_of(source, choice) for source in body.inputs)
        outputs = tuple(_spec_of(source, choice) for source in body.outputs)
        strategies = tuple(_chosen(inner, choice) for inner in body.records)
        bodies.append(JaxprPlan(inputs, strategies, outputs))
    operands = tuple(_spec_of(source, choice) for source in record.operands)
    results = tuple(_spec_of(source, choice) for source in record.results)
    return RegionPlan(operands, results, tuple(bodies))


def _spec_of(source: Source, choice: Sequence[int]) -> ShardingSpec:
    return source.specs[choice[source.node] if source.node is not None else 0]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


class _Builder:
    """Walks equations and fills a `ProblemBuilder`."""

    def __init__(self, costs: MeshCosts, stage: StageEqns) -> None:
        self.costs = costs
        self.stage = stage
        self.problem = ProblemBuilder()
        self.sources: dict[Any, Source] = {}
        self._edges: list[tuple[int, int | None, np.ndarray]] = []
        self._eqn_costs: list[tuple[int, int, np.ndarray]] = []
        self._eqn_edges: list[tuple[int, int, int, np.ndarray]] = []
        self._position = -1
        self._partial = _may_stay_partial(stage)
        self._order: dict[Any, int] = {}
        self._seconds: dict[Hashable, np.ndarray] = {}
        self._state_nodes: set[int] = set()

    # ------------------------------------------------------------------ whole stages

    def eqns(self, stage: StageEqns) -> list[Record]:
        defined = {var for eqn in stage.eqns for var in eqn.outvars if not is_drop(var)}
        weights = {"update": 1.0}
        records = []
        for position, (eqn, phase, key) in enumerate(
            zip(stage.eqns, stage.phases, stage.keys, strict=True)
        ):
            self._position = position
            weight = weights.get(phase, float(stage.num_microbatches))
            for number, atom in enumerate(eqn.invars):
                outside = not isinstance(atom, Literal) and atom not in defined
                if outside and atom not in self.sources:
                    input_key = None if key is None else ("input", key, number)
                    self._input(atom, input_key)
            records.append(self._eqn(eqn, key, weight, self.sources, phase))
        self._position = -1
        for new, old in stage.carried:
            if new in self.sources and old in self.sources:
                source = self.sources[old]
                self._convert(self.sources[new], source.node, source.specs, 1.0)
        return records

    def _input(self, var: Any, key: Hashable | None) -> None:
        pinned = self.stage.pins.get(var)
        if pinned is not None and key is not None:
            key = (key, pinned)  # only inputs that are pinned alike share a node
        node, source = self._value_node(var, key or ("input", id(var)), "input")
        self.sources[var] = source
        if var in self.stage.state:
            self._state_nodes.add(node)
            self._remember(var, source, 1.0)
        if pinned is not None:
            self._pin(source, pinned)

    def _pin(self, source: Source, pinned: Pin) -> None:
        """Forbid the strategies under which a value is not as pinned."""
        if source.node is not None:
            allowed = [0.0 if pinned.allows(spec) else math.inf for spec in source.specs]
            self.problem.add_cost(source.node, np.array(allowed))

    def _value_node(
        self, var: Any, key: Hashable, name: str, fixed_leading: bool = False
    ) -> tuple[int, Source]:
        shape = _shape(var)
        specs = sharding_specs(shape, self.costs.mesh)
        if fixed_leading:
            specs = tuple(spec for spec in specs if not spec.dims or not spec.dims[0])
        node = self.problem.node(key, name, [str(spec) for spec in specs])
        return node, Source(node, specs, shape, tensor_bytes(var))

    def _remember(self, var: Any, source: Source, copies: float) -> None:
        """Count the memory of a long-lived value at its node."""
        if source.node is None:
            return
        parts = [
            source.bytes / self.costs.mesh.size(tuple(a for dim in spec.dims for a in dim))
            for spec in source.specs
        ]
        self.problem.add_memory(source.node, np.array(parts) * copies)

    # ------------------------------------------------------------------ one equation

    def _eqn(
        self, eqn: Any, key: Hashable | None, weight: float, scope: dict[Any, Source], phase: str
    ) -> Record:
        key = key if key is not None else ("eqn", id(eqn))
        if eqn.primitive.name in _REGIONS or is_remat(eqn):
            record = self._region(eqn, key, weight, scope, phase)
        else:
            record = self._operator(eqn, key, weight, scope, phase)
        for var, source in zip(eqn.outvars, record.results, strict=True):
            if is_drop(var):
                continue
            scope[var] = source
            self._order[var] = len(self._order)
            if scope is self.sources:
                if var in self.stage.pins:
                    self._pin(source, self.stage.pins[var])
                if var in self.stage.kept:
                    self._remember(var, source, self.stage.kept[var])
                if var in self.stage.accumulated:
                    size = max(source.bytes, 4.0 * math.prod(source.shape))
                    widened = Source(source.node, source.specs, source.shape, size)
                    self._remember(var, widened, 1.0)
        return record

    def _operator(
        self, eqn: Any, key: Hashable, weight: float, scope: dict[Any, Source], phase: str
    ) -> Record:
        rule = sharding_rule(eqn)
        leader = None if rule is None else self._leader(eqn, rule, scope, phase)
        if rule is None:
            whole = tuple(ShardingSpec.replicated(len(_shape(a))) for a in eqn.invars)
            results = tuple(ShardingSpec.replicated(len(_shape(v))) for v in eqn.outvars)
            strategies: tuple[Strategy, ...] = (
                Strategy(assignment=(), operands=whole, results=results),
            )
        elif leader is not None:
            source = scope[eqn.invars[leader]]
            strategies = self._following(eqn, rule, leader, source)
        else:
            strategies = self.costs.strategies(rule)
        if is_pin(eqn):
            strategies = pinned_strategies(eqn, strategies, self.costs.mesh)
        if leader is not None:
            node = source.node
        else:
            node = self.problem.node(key, eqn.primitive.name, [str(s) for s in strategies])
        assert node is not None
        known = (key, id(strategies))
        if known not in self._seconds:
            self._seconds[known] = self._operator_seconds(eqn, rule, strategies)
        self._add_cost(node, self._seconds[known] * weight)
        for number, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal) and atom in scope:
                wanted = tuple(strategy.operands[number] for strategy in strategies)
                self._convert(scope[atom], node, wanted, weight)
        outputs = tuple(
            Source(node, tuple(s.results[k] for s in strategies), _shape(var), tensor_bytes(var))
            for k, var in enumerate(eqn.outvars)
        )
        if leader is None and len(outputs) == 1 and any(spec.partial for spec in outputs[0].specs):
            completed = self._completed(eqn.outvars[0], outputs[0], (key, "sum"), weight)
            return Record(node, strategies, (), (completed,), completed=completed)
        return Record(node, strategies, (), outputs)

    def _completed(self, var: Any, natural: Source, key: Hashable, weight: float) -> Source:
        """Return the source of an operator's result after its partial sums were completed."""
        allowed = var in self._partial
        finals, matrix = self._completions(natural, allowed)
        node = self.problem.node((key, allowed), "sum", [str(spec) for spec in finals])
        self._add_edge(natural.node, node, matrix * weight)
        return Source(node, finals, natural.shape, natural.bytes)

    def _completions(
        self, natural: Source, allowed: bool
    ) -> tuple[tuple[ShardingSpec, ...], np.ndarray]:
        """Return the specs sums can be completed in, and [natural, completed] seconds, remembered."""
        key = (natural.specs, natural.shape, natural.bytes, allowed)
        if key not in self.costs.completed:
            reachable = {
                spec: completed_specs(spec, natural.shape, self.costs.mesh, allowed)
                for spec in dict.fromkeys(natural.specs)
            }
            finals = tuple(dict.fromkeys(f for specs in reachable.values() for f in specs))
            position = {spec: number for number, spec in enumerate(finals)}
            matrix = np.full((len(natural.specs), len(finals)), math.inf)
            for row, spec in enumerate(natural.specs):
                for final in reachable[spec]:
                    matrix[row, position[final]] = self._completion_seconds(natural, spec, final)
            self.costs.completed[key] = (finals, matrix)
        return self.costs.completed[key]

    def _completion_seconds(
        self, source: Source, natural: ShardingSpec, final: ShardingSpec
    ) -> float:
        """Return the seconds to reduce-scatter and all-reduce partial sums into `final`."""
        mesh, total = self.costs.mesh, 0.0
        local = source.bytes / mesh.size(tuple(a for dim in natural.dims for a in dim))
        scattered = []
        for before, after in zip(natural.dims, final.dims, strict=True):
            for axis in after[len(before) :]:
                total += self.costs.collective_seconds("reduce-scatter", local, (axis,))
                local /= mesh.size((axis,))
                scattered.append(axis)
        summed = tuple(
            axis for axis in natural.partial if axis not in scattered and axis not in final.partial
        )
        if summed:
            total += self.costs.collective_seconds("all-reduce", local, summed)
        return total

    def _leader(
        self, eqn: Any, rule: ShardingRule, scope: Mapping[Any, Source], phase: str
    ) -> int | None:
        """Return the operand that a light equation follows; None: the equation has its own node.

        The largest operand; among equals one that comes from state (in the update), then the
        latest. An equation whose result is accumulated, or that reads an accumulated value in the
        update, has its own node, so that reductions are placed there.
        """
        if eqn.primitive.name.startswith(_HEAVY) or is_pin(eqn):
            return None
        if eqn.primitive.name.startswith("reduce_") and any(
            var in self.stage.accumulated for var in eqn.outvars
        ):
            return None
        best: tuple[float, bool, int] | None = None
        chosen = None
        for number, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal) or atom not in scope or scope[atom].node is None:
                continue
            if not any(rule.operands[number]):
                continue
            if phase == "update" and atom in self.stage.accumulated:
                continue
            from_state = phase == "update" and scope[atom].node in self._state_nodes
            rank = (scope[atom].bytes, from_state, self._order.get(atom, -1))
            if best is None or rank > best:
                best, chosen = rank, number
        reads = [a for a in eqn.invars if not isinstance(a, Literal)]
        if phase == "update" and any(a in self.stage.accumulated for a in reads):
            if chosen is None or not best or not best[1]:
                return None
        return chosen

    def _following(
        self, eqn: Any, rule: ShardingRule, leader: int, source: Source
    ) -> tuple[Strategy, ...]:
        """Return the strategy of `eqn` under each spec of the operand it follows."""
        passes = all(var in self._partial for var in eqn.outvars) and linear_operands(eqn)
        key = (rule, leader, passes, source.specs)
        if key not in self.costs.followed:
            found = {
                spec: self._followed(rule, leader, spec, passes)
                for spec in dict.fromkeys(source.specs)
            }
            self.costs.followed[key] = tuple(found[spec] for spec in source.specs)
        return self.costs.followed[key]

    def _followed(
        self, rule: ShardingRule, leader: int, spec: ShardingSpec, passes: bool
    ) -> Strategy:
        mesh = self.costs.mesh
        shardable = _shardable(rule)
        assignment: dict[str, tuple[str, ...]] = {}
        for dim, axes in zip(rule.operands[leader], spec.dims, strict=True):
            if dim and dim[0] in shardable and dim[0] not in assignment:
                size = rule.factor(dim[0]).size
                while axes and size % mesh.size(axes):
                    axes = axes[:-1]
                if axes:
                    assignment[dim[0]] = axes
        partial = spec.partial if passes else ()

        def sharded(dims: tuple[tuple[str, ...], ...]) -> ShardingSpec:
            return ShardingSpec(
                tuple(tuple(a for name in dim for a in assignment.get(name, ())) for dim in dims),
                partial,
            )

        return Strategy(
            assignment=tuple(sorted(assignment.items())),
            operands=tuple(sharded(dims) for dims in rule.operands),
            results=tuple(sharded(dims) for dims in rule.results),
        )

    def _operator_seconds(
        self, eqn: Any, rule: ShardingRule | None, strategies: Sequence[Strategy]
    ) -> np.ndarray:
        """Return [strategies] seconds of compute and of completing partial sums."""
        name = eqn.primitive.name
        work, traffic = flops(eqn), traffic_bytes(eqn)
        kind = _MATMULS.get(name, "convolution" if name.startswith("conv_") else "elementwise")
        dtype = dtype_name(eqn.invars[0].aval.dtype) if eqn.invars else "float32"
        seconds = []
        for strategy in strategies:
            shards = self.costs.mesh.size(tuple(a for _, axes in strategy.assignment for a in axes))
            cost = self.costs.compute_seconds(kind, work / shards, traffic / shards, dtype)
            if rule is not None:
                cost += self._inner_seconds(eqn, rule, strategy)
            seconds.append(cost)
        return np.array(seconds)

    def _inner_seconds(self, eqn: Any, rule: ShardingRule, strategy: Strategy) -> float:
        """Return the seconds of collectives inside an operator, and of sums it completes itself.

        Sums over "add" factors are completed elsewhere for operators with a node of their own.
        """
        mesh, total = self.costs.mesh, 0.0
        reduced: list[str] = []
        for name, axes in strategy.assignment:
            factor = rule.factor(name)
            if factor.kind == "permutation":
                total += self.costs.collective_seconds(
                    "collective-permute", _halo_bytes(eqn, rule, strategy, name, mesh), axes
                )
            elif factor.kind == "reduction":
                reduced += axes
        for var, result in zip(eqn.outvars, strategy.results, strict=True):
            summed = tuple(axis for axis in reduced if axis not in result.partial)
            if summed:
                local = tensor_bytes(var) / mesh.size(tuple(a for dim in result.dims for a in dim))
                total += self.costs.collective_seconds("all-reduce", local, summed)
        return total

    # ------------------------------------------------------------------ reading values

    def _convert(
        self,
        source: Source,
        node: int | None,
        wanted: Sequence[ShardingSpec],
        weight: float,
    ) -> None:
        """Add the cost of converting a value from its producer's specs to those wanted by
        `node`."""
        if source.node is None or node is None or not source.shape:
            return
        matrix = (
            self.costs.conversion_seconds(source.shape, source.bytes, source.specs, tuple(wanted))
            * weight
        )
        self._add_edge(source.node, node, matrix)

    def _add_edge(self, first: int | None, second: int, matrix: np.ndarray) -> None:
        assert first is not None
        self.problem.add_edge(first, second, matrix)
        if self._position >= 0:
            self._eqn_edges.append((self._position, first, second, matrix))

    def _add_cost(self, node: int, cost: np.ndarray) -> None:
        self.problem.add_cost(node, cost)
        if self._position >= 0:
            self._eqn_costs.append((self._position, node, cost))

    # ------------------------------------------------------------------ regions

    def _region(
        self, eqn: Any, key: Hashable, weight: float, scope: dict[Any, Source], phase: str
    ) -> Record:
        outer = [self._operand(atom, scope) for atom in eqn.invars]
        bodies = [closed(body) for _, body in subjaxprs(eqn)]
        name = eqn.primitive.name
        if is_remat(eqn):
            body = self._body(bodies[0], (key, "remat"), weight, outer, phase)
            return Record(None, (), tuple(outer), body.outputs, (body,))
        if name == "scan":
            return self._scan(eqn, bodies[0], key, weight, outer, phase)
        if name == "while":
            return self._while(eqn, key, weight, outer, phase)
        return self._cond(eqn, bodies, key, weight, outer, phase)

    def _operand(self, atom: Any, scope: Mapping[Any, Source]) -> Source:
        if not isinstance(atom, Literal) and atom in scope:
            return scope[atom]
        rank = len(_shape(atom))
        return Source(None, (ShardingSpec.replicated(rank),), _shape(atom), tensor_bytes(atom))

    def _entry(
        self, var: Any, key: Hashable, outer: Source, weight: float, stacked: int | None = None
    ) -> Source:
        """Return the source of a region's input, converted once from the value outside."""
        node, source = self._value_node(var, key, "region input")
        specs = source.stacked(stacked).specs if stacked is not None else source.specs
        self._convert(outer, node, specs, weight)
        return source

    def _body(
        self, body: Any, key: Hashable, weight: float, inputs: Sequence[Source], phase: str
    ) -> _Body:
        jaxpr = open_jaxpr(body)
        scope: dict[Any, Source] = dict(zip(jaxpr.invars, inputs, strict=True))
        records = [
            self._eqn(inner, (key, number), weight, scope, phase)
            for number, inner in enumerate(jaxpr.eqns)
        ]
        outputs = tuple(self._operand(atom, scope) for atom in jaxpr.outvars)
        return _Body(body, tuple(inputs), outputs, tuple(records))

    def _scan(
        self, eqn: Any, body: Any, key: Hashable, weight: float, outer: list[Source], phase: str
    ) -> Record:
        num_consts, num_carry, _ = scan_counts(eqn)
        length = eqn.params["length"]
        jaxpr = open_jaxpr(body)
        inputs, operands = [], []
        for number, (var, source) in enumerate(zip(jaxpr.invars, outer, strict=True)):
            stacked = length if number >= num_consts + num_carry else None
            entry = self._entry(var, (key, "in", number), source, weight, stacked)
            inputs.append(entry)
            operands.append(entry.stacked(length) if stacked is not None else entry)
        inner = self._body(body, (key, "body"), weight * length, inputs, phase)
        carries = inputs[num_consts : num_consts + num_carry]
        for carry, result in zip(carries, inner.outputs[:num_carry], strict=True):
            self._convert(result, carry.node, carry.specs, weight * length)
        inner.outputs = (*carries, *inner.outputs[num_carry:])
        results = (*carries, *(source.stacked(length) for source in inner.outputs[num_carry:]))
        return Record(None, (), tuple(operands), results, (inner,))

    def _while(
        self, eqn: Any, key: Hashable, weight: float, outer: list[Source], phase: str
    ) -> Record:
        params = eqn.params
        cond, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        trips = weight * self.costs.while_trips
        variables = [
            *open_jaxpr(cond).invars[:num_cond],
            *open_jaxpr(body).invars,
        ]
        entries = [
            self._entry(var, (key, "in", number), source, weight)
            for number, (var, source) in enumerate(zip(variables, outer, strict=True))
        ]
        carries = entries[num_cond + num_body :]
        tested = self._body(cond, (key, "cond"), trips, [*entries[:num_cond], *carries], phase)
        tested.outputs = (self._whole(open_jaxpr(cond).outvars[0]),)
        inner = self._body(body, (key, "body"), trips, entries[num_cond:], phase)
        for carry, result in zip(carries, inner.outputs, strict=True):
            self._convert(result, carry.node, carry.specs, trips)
        inner.outputs = tuple(carries)
        return Record(None, (), tuple(entries), tuple(carries), (tested, inner))

    def _whole(self, atom: Any) -> Source:
        rank = len(_shape(atom))
        return Source(None, (ShardingSpec.replicated(rank),), _shape(atom), tensor_bytes(atom))

    def _cond(
        self,
        eqn: Any,
        branches: Sequence[Any],
        key: Hashable,
        weight: float,
        outer: list[Source],
        phase: str,
    ) -> Record:
        entries = [
            self._entry(var, (key, "in", number), source, weight)
            for number, (var, source) in enumerate(
                zip(open_jaxpr(branches[0]).invars, outer[1:], strict=True)
            )
        ]
        results = tuple(
            self._value_node(var, (key, "out", number), "branch result")[1]
            for number, var in enumerate(eqn.outvars)
        )
        bodies = []
        for number, branch in enumerate(branches):
            body = self._body(branch, (key, "branch", number), weight, entries, phase)
            for result, produced in zip(results, body.outputs, strict=True):
                self._convert(produced, result.node, result.specs, weight)
            body.outputs = results
            bodies.append(body)
        predicate = self._whole(eqn.invars[0])
        return Record(None, (), (predicate, *entries), results, tuple(bodies))

    # ------------------------------------------------------------------ costs by equation

    def costs_by_equation(
        self, count: int
    ) -> tuple[Callable[[Sequence[int]], np.ndarray], Callable[[], np.ndarray]]:
        """Return functions for [equations] seconds per step: under a choice, and at the very
        least."""
        costs, edges = self._eqn_costs, self._eqn_edges

        def by_equation(choice: Sequence[int]) -> np.ndarray:
            seconds = np.zeros(count)
            for position, node, cost in costs:
                seconds[position] += cost[choice[node]]
            for position, first, second, matrix in edges:
                seconds[position] += matrix[choice[first], choice[second]]
            return seconds

        def least() -> np.ndarray:
            seconds = np.zeros(count)
            for position, _, cost in costs:
                seconds[position] += cost.min()
            return seconds

        return by_equation, least


@functools.lru_cache(maxsize=65536)
def _shardable(rule: ShardingRule) -> frozenset[str]:
    return frozenset(shardable_factors(rule))


def _halo_bytes(
    eqn: Any, rule: ShardingRule, strategy: Strategy, name: str, mesh: LogicalMesh
) -> float:
    """Return the bytes a device exchanges with a neighbour along a permutation factor."""
    factor = rule.factor(name)
    for atom, dims in zip(eqn.invars, rule.operands, strict=True):
        if any(name in dim for dim in dims):
            axes = tuple(a for dim in dims for n in dim for a in strategy.axes(n) if n != name)
            return tensor_bytes(atom) / mesh.size(axes) / factor.size * max(factor.halo, 1)
    return 0.0


def _may_stay_partial(stage: StageEqns) -> frozenset[Any]:
    """Return the values that may remain unreduced sums until the update.

    Accumulated gradients, and values that reach them through linear operators only.
    """
    if stage.num_microbatches == 1:
        return frozenset()
    allowed: set[Any] = set()
    blocked: set[Any] = set()
    for eqn, phase in zip(reversed(stage.eqns), reversed(stage.phases), strict=True):
        if phase == "update":
            continue
        outputs = [var for var in eqn.outvars if not is_drop(var)]
        for var in outputs:
            if var in stage.accumulated and var not in blocked:
                allowed.add(var)
        passes = (
            bool(outputs)
            and all(var in allowed for var in outputs)
            and not subjaxprs(eqn)
            and linear_operands(eqn)
        )
        for atom in eqn.invars:
            if isinstance(atom, Literal) or not _shape(atom):
                continue
            if passes and atom not in blocked:
                allowed.add(atom)
            else:
                blocked.add(atom)
                allowed.discard(atom)
    return frozenset(allowed - blocked)


def tensor_type(atom: Any) -> TensorType:
    """Return the interchange type of an array value."""
    return TensorType(_shape(atom), str(atom.aval.dtype))


__all__ = [
    "MeshCosts",
    "Record",
    "Selection",
    "ShardingSolution",
    "Source",
    "StageEqns",
    "build",
    "tensor_type",
]
