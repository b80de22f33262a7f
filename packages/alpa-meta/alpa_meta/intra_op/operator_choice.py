"""What an operator of a selection problem chooses from, and what each of it costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from alpa_interchange import ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.intra_op.equation_seconds import Priced
from alpa_meta.intra_op.layouts import Columns
from alpa_meta.intra_op.light_equations import leading_operand
from alpa_meta.intra_op.operator_seconds import operator_seconds, strategy_sends
from alpa_meta.intra_op.placed_equations import Placed
from alpa_meta.intra_op.sent_seconds import Sends
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.operators import (
    linear_operands,
    rule_number,
)
from alpa_meta.pinning import UnfitPinError, is_pin, pinned_strategies

if TYPE_CHECKING:
    from alpa_meta.intra_op.builder import Builder


@frozen(eq=False)
class OperatorChoice:
    """What an operator chooses from; `seconds` per strategy."""

    leader: int | None
    node: int
    strategies: tuple[Strategy, ...]
    seconds: Priced
    partial: bool  # sums may be left to be completed
    sends: Sequence[Callable[[Strategy], Iterator[Sends]]]  # inside it, by size, if anything
    columns: Columns  # the specs of its operands and results under its strategies


def operator_choice(builder: Builder, one: Placed, scope: dict[Atom, Source]) -> OperatorChoice:
    """Return what an operator chooses from, remembered for equal ones that read alike."""
    eqn, number = one.eqn, builder.costs.number
    read = [scope.get(var) for var in one.facts.reads]
    alike = (one.alike, tuple([None if s is None else (s.node, number(s.specs)) for s in read]))
    known = builder.operators.get(alike)
    if known is None:
        leader = _leader(builder, eqn, one.rule, scope, one.phase)
        strategies = _strategies(builder, eqn, one.rule, leader, scope)
        if leader is not None:
            node = scope[eqn.invars[leader]].node
        elif len(strategies) == 1 and _are_whole(strategies[0].results):
            node = builder.fixed
        else:
            node = builder.new_node(one.key, eqn.primitive.name, strategies)
        assert node is not None
        known = builder.operators[alike] = OperatorChoice(
            leader,
            node,
            strategies,
            _seconds(builder, one, strategies),
            builder.costs.layouts.leaves_sums(number(strategies)),
            _sends(builder, one),
            builder.costs.columns(strategies),
        )
    return known


def _are_whole(specs: Sequence[ShardingSpec]) -> bool:
    """Return whether every device has all of what has these specs, so that nothing is sent for any
    other: a pinned value that is cut, the only choice of its pin, has to be gathered."""
    return not any(spec.partial or any(spec.dims) for spec in specs)


def _seconds(builder: Builder, one: Placed, strategies: tuple[Strategy, ...]) -> Priced:
    """Return [strategies] seconds per step at each size, remembered for all operators alike."""
    alike = (one.priced, builder.costs.number(strategies))
    known = builder.seconds.get(alike)
    if known is None:
        costs, rule, late, together = builder.costs, one.rule, one.late, one.together
        weights = [one.weight, *builder.weights(one.weight)]
        of = zip((one.eqn, *one.twins), weights, one.moved, strict=False)
        known = builder.seconds[alike] = Priced(
            tuple(
                [
                    times * operator_seconds(costs, own, rule, strategies, late, bytes, together)
                    for own, times, bytes in of
                ]
            )
        )
    return known


def _sends(builder: Builder, one: Placed) -> list[Callable[[Strategy], Iterator[Sends]]]:
    """Return what names the collectives inside an operator under a strategy, by size; none where
    there are none under any."""
    rule = one.rule
    if rule is None or not one.sends:
        return []
    weights = (one.weight, *builder.weights(one.weight))
    return [
        functools.partial(strategy_sends, builder.costs, own, rule, one.late, one.together, times)
        for own, times in zip((one.eqn, *one.twins), weights, strict=False)
    ]


def _leader(
    builder: Builder,
    eqn: JaxprEqn,
    rule: ShardingRule | None,
    scope: dict[Atom, Source],
    phase: str,
) -> int | None:
    """Return the operand that an equation follows, if any."""
    if rule is None:
        return None
    return leading_operand(
        eqn,
        rule,
        scope,
        phase,
        accumulated=builder.stage.accumulated,
        state_nodes=builder.state_nodes,
        order=builder.order,
        spread=builder.spread,
    )


def _strategies(
    builder: Builder,
    eqn: JaxprEqn,
    rule: ShardingRule | None,
    leader: int | None,
    scope: dict[Atom, Source],
) -> tuple[Strategy, ...]:
    """Return the strategies of an equation; UnfitPinError if it is a pin that allows none."""
    if rule is None:
        whole = tuple(ShardingSpec.replicated(len(shape_of(a))) for a in eqn.invars)
        results = tuple(ShardingSpec.replicated(len(shape_of(v))) for v in eqn.outvars)
        return builder.costs.only(Strategy(assignment=(), operands=whole, results=results))
    if leader is not None:
        leaves = all(var in builder.partial for var in eqn.outvars)
        passes = leaves and linear_operands(eqn)
        specs = builder.costs.number(scope[eqn.invars[leader]].specs)
        alike = (rule_number(eqn), leader, specs, passes, leaves)
        known = builder.following.get(alike)
        if known is None:
            known = builder.costs.layouts.following(rule, leader, specs, passes, leaves)
            builder.following[alike] = known
        return known
    strategies = builder.costs.layouts.strategies(rule)
    if is_pin(eqn):
        strategies = pinned_strategies(eqn, strategies, builder.costs.mesh)
        if not strategies:
            raise UnfitPinError(
                f"no way to shard {eqn.primitive.name} of shape {shape_of(eqn.outvars[0])} is "
                "as pinned; leave the dims free that cannot be sharded"
            )
    return strategies
