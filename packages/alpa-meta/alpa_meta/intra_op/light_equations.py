"""Equations that follow an operand: which one (their strategies then: `Layouts.following`).

A light equation (elementwise, layout) has no node of its own: it shares that of the operand it
follows and takes the sharding it finds there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from alpa_interchange import ShardingRule
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.operators import is_heavy
from alpa_meta.passes.shared_reads import is_shared_read
from alpa_meta.pinning import is_pin


def leading_operand(
    eqn: JaxprEqn,
    rule: ShardingRule,
    scope: Mapping[Atom, Source],
    phase: str,
    *,
    accumulated: Collection[Atom],
    state_nodes: Collection[int],
    order: Mapping[Var, int],
    spread: Collection[Atom] = (),
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
