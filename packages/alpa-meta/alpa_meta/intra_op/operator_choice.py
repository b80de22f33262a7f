"""What an operator of a selection problem chooses from, and what each of it costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from attrs import frozen

from alpa_interchange import ShardingRule, ShardingSpec, Strategy
from alpa_meta.compat import Atom, JaxprEqn, shape_of
from alpa_meta.intra_op.equation_facts import facts_of
from alpa_meta.intra_op.equation_seconds import Priced
from alpa_meta.intra_op.layouts import Columns
from alpa_meta.intra_op.light_equations import leading_operand
from alpa_meta.intra_op.operator_seconds import operator_seconds
from alpa_meta.intra_op.stage_problem import Source
from alpa_meta.operators import (
    linear_operands,
    operator_signature,
    rule_number,
    sharding_rule,
)
from alpa_meta.pinning import UnfitPinError, is_pin, pinned_strategies

SENDING = ("permutation", "reduction")  # factors whose sharding costs collectives in an operator

if TYPE_CHECKING:
    from alpa_meta.intra_op.builder import Builder


@frozen(eq=False)
class OperatorChoice:
    """What an operator chooses from; `seconds` per strategy."""

    rule: ShardingRule | None
    leader: int | None
    node: int
    strategies: tuple[Strategy, ...]
    seconds: Priced
    late: bool  # sums that it completes travel in buckets
    partial: bool  # sums may be left to be completed
    together: int  # equations whose sums are sent with its own
    sends: bool  # there may be collectives inside it
    columns: Columns  # the specs of its operands and results under its strategies

    def results(self, eqn: JaxprEqn, twins: Sequence[JaxprEqn]) -> tuple[Source, ...]:
        """Return the results of the equation, with their bytes in its `twins` at other sizes."""
        others = [facts_of(twin).results for twin in twins]
        sizes = [[size for _, size in one] for one in zip(*others, strict=True)] or repeat(())
        results = zip(self.columns.results, facts_of(eqn).results, sizes, strict=False)
        return tuple([Source(self.node, x, *own, tuple(other)) for x, own, other in results])


def operator_choice(
    builder: Builder,
    eqn: JaxprEqn,
    key: Hashable,
    weight: float,
    scope: dict[Atom, Source],
    phase: str,
) -> OperatorChoice:
    """Return what an operator chooses from, remembered for equal ones that read alike."""
    late, together = builder.is_late(eqn), builder.together.get(id(eqn), 1)
    reads, accumulated, number = (
        facts_of(eqn).reads,
        builder.stage.accumulated,
        builder.costs.number,
    )
    read = [scope.get(var) for var in reads]
    alike = (
        key,
        weight,
        late,
        together,
        builder.moved[id(eqn)],
        tuple([None if s is None else (s.node, number(s.specs)) for s in read]),
        tuple([v in accumulated for v in reads]),
        tuple([(v in builder.partial, v in accumulated) for v in eqn.outvars]),
    )
    known = builder.operators.get(alike)
    if known is None:
        rule = sharding_rule(eqn)
        leader = _leader(builder, eqn, rule, scope, phase)
        strategies = _strategies(builder, eqn, rule, leader, scope)
        if leader is not None:
            node = scope[eqn.invars[leader]].node
        elif len(strategies) == 1 and not any(spec.partial for spec in strategies[0].results):
            node = builder.fixed
        else:
            node = builder.new_node(key, eqn.primitive.name, strategies)
        assert node is not None
        seconds = _seconds(builder, eqn, rule, strategies, weight, late, together)
        partial = builder.costs.layouts.leaves_sums(number(strategies))
        sends = rule is not None and any(f.kind in SENDING for f in rule.factors)
        known = OperatorChoice(
            rule,
            leader,
            node,
            strategies,
            seconds,
            late,
            partial,
            together,
            sends,
            builder.costs.columns(strategies),
        )
        builder.operators[alike] = known
    return known


def _seconds(
    builder: Builder,
    eqn: JaxprEqn,
    rule: ShardingRule | None,
    strategies: tuple[Strategy, ...],
    weight: float,
    late: bool,
    together: int,
) -> Priced:
    """Return [strategies] seconds per step at each size, remembered for all operators alike."""
    twins = builder.others.eqns.get(id(eqn), ())
    of = tuple(map(operator_signature, (eqn, *twins)))
    moved = builder.moved[id(eqn)]
    alike = (of, moved, builder.costs.number(strategies), weight, late, together, builder.updates)
    known = builder.seconds.get(alike)
    if known is None:
        weights = [weight, *builder.weights(weight)]
        known = builder.seconds[alike] = tuple(
            [
                times
                * operator_seconds(builder.costs, one, rule, strategies, late, bytes, together)
                for one, times, bytes in zip((eqn, *twins), weights, moved, strict=False)
            ]
        )
    return known


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
