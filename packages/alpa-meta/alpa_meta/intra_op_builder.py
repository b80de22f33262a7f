"""The walk over a stage's equations that fills its selection problem (see `intra_op`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from alpa_interchange import LogicalMesh, ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import Literal, dtype_name, is_drop, is_remat, subjaxprs
from alpa_meta.intra_op_regions import region_record
from alpa_meta.layering import tensor_bytes
from alpa_meta.mesh_costs import MeshCosts
from alpa_meta.pinning import Pin, is_pin, pinned_strategies
from alpa_meta.rules import flops, linear_operands, sharding_rule, traffic_bytes
from alpa_meta.rules.operator import shape_of
from alpa_meta.stage_problem import Record, Source, StageEqns
from ilp_sharding.problem_builder import ProblemBuilder
from ilp_sharding.spec_conversion import sharding_specs
from ilp_sharding.strategies import completed_specs, shardable_factors

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


class Builder:
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
            records.append(self.equation(eqn, key, weight, self.sources, phase))
        self._position = -1
        for new, old in stage.carried:
            if new in self.sources and old in self.sources:
                source = self.sources[old]
                self.convert(self.sources[new], source.node, source.specs, 1.0)
        return records

    def _input(self, var: Any, key: Hashable | None) -> None:
        pinned = self.stage.pins.get(var)
        if pinned is not None and key is not None:
            key = (key, pinned)  # only inputs that are pinned alike share a node
        node, source = self.value_node(var, key or ("input", id(var)), "input")
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

    def value_node(
        self, var: Any, key: Hashable, name: str, fixed_leading: bool = False
    ) -> tuple[int, Source]:
        shape = shape_of(var)
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

    def equation(
        self, eqn: Any, key: Hashable | None, weight: float, scope: dict[Any, Source], phase: str
    ) -> Record:
        key = key if key is not None else ("eqn", id(eqn))
        if eqn.primitive.name in _REGIONS or is_remat(eqn):
            record = region_record(self, eqn, key, weight, scope, phase)
        else:
            record = self.operator(eqn, key, weight, scope, phase)
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

    def operator(
        self, eqn: Any, key: Hashable, weight: float, scope: dict[Any, Source], phase: str
    ) -> Record:
        rule = sharding_rule(eqn)
        leader = None if rule is None else self._leader(eqn, rule, scope, phase)
        if rule is None:
            whole = tuple(ShardingSpec.replicated(len(shape_of(a))) for a in eqn.invars)
            results = tuple(ShardingSpec.replicated(len(shape_of(v))) for v in eqn.outvars)
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
                self.convert(scope[atom], node, wanted, weight)
        outputs = tuple(
            Source(node, tuple(s.results[k] for s in strategies), shape_of(var), tensor_bytes(var))
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
        """Return the specs sums can be completed in, and [natural, completed] seconds,
        remembered."""
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

    def convert(
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
            if isinstance(atom, Literal) or not shape_of(atom):
                continue
            if passes and atom not in blocked:
                allowed.add(atom)
            else:
                blocked.add(atom)
                allowed.discard(atom)
    return frozenset(allowed - blocked)
