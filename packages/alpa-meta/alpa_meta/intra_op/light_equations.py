"""Equations that follow an operand: which one, and the strategies they have then.

A light equation (elementwise, layout) has no node of its own: it shares that of the operand it
follows and takes the sharding it finds there.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from alpa_interchange import LogicalMesh, ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.operators import is_heavy
from alpa_meta.passes.shared_reads import is_shared_read
from alpa_meta.pinning import is_pin
from ilp_sharding.strategies import shardable_factors


def leading_operand(
    eqn: JaxprEqn,
    rule: ShardingRule,
    scope: Mapping[Atom, Source],
    phase: str,
    *,
    accumulated: Collection[Any],
    state_nodes: Collection[int],
    order: Mapping[Var, int],
    spread: Collection[Any] = (),
) -> int | None:
    """Return the operand that a light equation follows; None: the equation has its own node.

    The largest operand; among equals one that comes from state (in the update), then one that is
    not `spread`, which means broadcast from a smaller one, then the latest. An equation whose
    result is accumulated, or that reads an accumulated value in the update, has its own node, so
    that reductions are placed there. `order` numbers the values as they were computed.
    """
    if is_heavy(eqn) or is_pin(eqn) or is_shared_read(eqn):
        return None
    sums = any(factor.kind == "reduction" for factor in rule.factors)
    if sums and any(var in accumulated for var in eqn.outvars):
        return None
    best: tuple[float, bool, bool, int] | None = None
    chosen = None
    for number, atom in enumerate(eqn.invars):
        if isinstance(atom, Literal) or atom not in scope or scope[atom].node is None:
            continue
        if not any(rule.operands[number]):
            continue
        if phase == "update" and atom in accumulated:
            continue
        from_state = phase == "update" and scope[atom].node in state_nodes
        rank = (scope[atom].bytes, from_state, atom not in spread, order.get(atom, -1))
        if best is None or rank > best:
            best, chosen = rank, number
    reads = [a for a in eqn.invars if not isinstance(a, Literal)]
    if phase == "update" and any(a in accumulated for a in reads):
        if chosen is None or not best or not best[1]:
            return None
    return chosen


def following_strategies(
    costs: MeshCosts,
    rule: ShardingRule,
    leader: int,
    source: Source,
    *,
    passes: bool = False,
    leaves: bool = False,
) -> tuple[Strategy, ...]:
    """Return the strategy under each spec of the operand that is followed, remembered.

    Partial sums go through an equation that `passes` them on, and are completed before any other.
    One that `leaves` its own sums to be completed behind its region does so under every spec.
    """
    key = (costs.number(rule), leader, passes, leaves, costs.number(source.specs))
    if key not in costs.followed:
        found = {
            spec: _followed(costs.mesh, rule, leader, spec, passes, leaves)
            for spec in dict.fromkeys(source.specs)
        }
        costs.followed[key] = tuple(found[spec] for spec in source.specs)
    return costs.followed[key]


def _followed(
    mesh: LogicalMesh,
    rule: ShardingRule,
    leader: int,
    spec: ShardingSpec,
    passes: bool,
    leaves: bool,
) -> Strategy:
    shardable = _shardable(rule)
    assignment: dict[str, tuple[str, ...]] = {}
    for dim, axes in zip(rule.operands[leader], spec.dims, strict=True):
        if dim and dim[0] in shardable and dim[0] not in assignment:
            size = rule.factor(dim[0]).size
            while axes and size % mesh.size(axes):
                axes = axes[:-1]
            if axes:
                assignment[dim[0]] = axes
    passed = spec.partial if passes else ()
    own = {
        axis
        for name, axes in assignment.items()
        if leaves and rule.factor(name).kind == "reduction" and rule.factor(name).reduction == "add"
        for axis in axes
    }
    left = tuple(axis for axis in mesh.axis_names if axis in own or axis in passed)

    def sharded(dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> ShardingSpec:
        return ShardingSpec(
            tuple(tuple(a for name in dim for a in assignment.get(name, ())) for dim in dims),
            partial,
        )

    return Strategy(
        assignment=tuple(sorted(assignment.items())),
        operands=tuple(sharded(dims, passed) for dims in rule.operands),
        results=tuple(sharded(dims, left) for dims in rule.results),
    )


@functools.lru_cache(maxsize=65536)
def _shardable(rule: ShardingRule) -> frozenset[str]:
    return frozenset(shardable_factors(rule))
