"""What the walk over a stage asks of every equation at its place, found once for all meshes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from attrs import define, field, frozen

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, Var, is_drop
from alpa_meta.intra_op.bucketed_traffic import late_values, sums_together
from alpa_meta.intra_op.equation_facts import EquationFacts, facts_of
from alpa_meta.intra_op.fused_traffic import Bytes, fused_traffic
from alpa_meta.intra_op.other_sizes import OtherSizes
from alpa_meta.intra_op.partial_sums import may_stay_partial
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.operators import is_heavy, operator_of, operator_signature, sharding_rule
from alpa_meta.operators.operator import Operator
from alpa_meta.passes.shared_reads import is_shared_read
from alpa_meta.program_caches import cached_by_program

SENDING = ("permutation", "reduction")  # factors whose sharding costs collectives in an operator


@frozen(eq=False)
class Placed:
    """An operator at its place in a stage, where it runs `weight` times a step, on any mesh."""

    eqn: JaxprEqn
    key: Hashable  # of its node
    weight: float
    phase: str
    facts: EquationFacts
    operator: Operator
    rule: ShardingRule | None
    twins: tuple[JaxprEqn, ...]  # at the other sizes
    # Shape, bytes, and bytes at the other sizes of each result.
    results: tuple[tuple[tuple[int, ...], float, tuple[float, ...]], ...]
    moved: Bytes
    waited_for: bool  # by more than the update and the result
    late: bool  # sums that it completes travel in buckets
    together: int  # operators whose sums are sent with its own
    sums: bool  # a factor of its rule is summed over
    sends: bool  # there may be collectives inside it
    shared_read: bool
    alike: int  # equal for operators that choose alike where they read alike
    priced: int  # equal for operators whose strategies cost the same


@define(eq=False)
class PlacedEquations:
    """The operators of a stage, by position (None: a region or a barrier), and those of bodies."""

    stage: StageEqns
    others: OtherSizes
    moved: Mapping[JaxprEqn, Bytes]
    together: Mapping[JaxprEqn, int]
    late: frozenset[Var]
    partial: frozenset[Var]
    of: list[Placed | None] = field(factory=list)
    _numbers: dict[Hashable, int] = field(factory=dict)

    def place(
        self,
        eqn: JaxprEqn,
        key: Hashable,
        weight: float,
        phase: str,
        late: Collection[Var],
        partial: Collection[Var],
    ) -> Placed | None:
        """Return an operator that runs `weight` times a step: only the update waits for `late`
        values, `partial` ones may stay unreduced sums."""
        facts = facts_of(eqn)
        if facts.region:
            return None
        operator = operator_of(eqn)
        if len(eqn.outvars) > 1 and operator.passes_on:
            return None
        rule, accumulated = sharding_rule(eqn), self.stage.accumulated
        kinds = () if rule is None else [factor.kind for factor in rule.factors]
        twins = self.others.eqns.get(eqn, ())
        sizes = [[size for _, size in facts_of(twin).results] for twin in twins]
        moved, together = self.moved[eqn], self.together.get(eqn, 1)
        waited_for = not all(is_drop(var) or var in late for var in eqn.outvars)
        in_buckets = phase == "update" or not waited_for
        ways = (
            key,
            weight,
            in_buckets,
            together,
            moved,
            tuple([var in accumulated for var in facts.reads]),
            tuple([(var in partial, var in accumulated) for var in eqn.outvars]),
        )
        signatures = tuple(map(operator_signature, (eqn, *twins)))
        price = (signatures, moved, weight, in_buckets, together, phase == "update")
        return Placed(
            eqn,
            key,
            weight,
            phase,
            facts,
            operator,
            rule,
            twins,
            tuple([(*one, tuple([of[k] for of in sizes])) for k, one in enumerate(facts.results)]),
            moved,
            waited_for,
            in_buckets,
            together,
            "reduction" in kinds,
            any(kind in SENDING for kind in kinds),
            is_shared_read(eqn),
            self._numbers.setdefault(ways, len(self._numbers)),
            self._numbers.setdefault(price, len(self._numbers)),
        )


@cached_by_program(16)  # stages are on many meshes
def placed_equations(
    stage: StageEqns, others: OtherSizes, platform: str, attends: bool
) -> PlacedEquations:
    """Return the operators of a stage, remembered."""
    found = PlacedEquations(
        stage,
        others,
        fused_traffic(stage, others, platform, attends),
        sums_together(stage, is_heavy),
        late_values(stage, is_heavy),
        may_stay_partial(stage),
    )
    for eqn, phase, key in zip(stage.eqns, stage.phases, stage.keys, strict=True):
        own = key if key is not None else ("eqn", eqn)
        weight = 1.0 if phase == "update" else float(stage.num_microbatches)
        found.of.append(found.place(eqn, own, weight, phase, found.late, found.partial))
    return found
