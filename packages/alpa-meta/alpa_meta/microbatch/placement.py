"""Where the microbatches hold a value, and how one operator runs on what a microbatch holds.

A step cut into microbatches is the step of the whole batch on a virtual mesh axis that is walked in
time instead of along devices. Every value has one of the placements of such an axis (the words are
those of PyTorch's DTensor; Shardy says replicated, sharded, unreduced):

    replicated  the same in every microbatch
    split       each microbatch has its own part along `dim`
    sum         each has a part of a sum; the value is the sum over the microbatches
    extreme     the value is the largest ("max") or smallest ("min") over the microbatches
    mixed       none of these: no microbatch can compute its share alone

So a microbatch runs the local form of each operator, as a device does on its shard, and what the
factors of the sharding rule say of devices holds for microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn
from alpa_meta.operators import Operator, operator_of, sharding_rule
from alpa_meta.operators.elementwise import extreme_taken


@frozen
class Placement:
    """How the microbatches hold a value; `zero` says that it is known to be zero everywhere."""

    kind: str
    dim: int = -1  # of "split"
    reduction: str = "add"  # "max" or "min" of "extreme"
    zero: bool = False


REPLICATED = Placement("replicated")
SUM = Placement("sum")
MIXED = Placement("mixed")

_EXTREMES = {"max": "max", "or": "max", "min": "min", "and": "min"}


def split(dim: int) -> Placement:
    """Return the placement of values split along `dim`."""
    return Placement("split", dim)


class MixedError(Exception):
    """An operator of this equation cannot run in microbatches on what it reads."""

    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__(eqn.primitive.name)
        self.eqn = eqn


@frozen
class Reading:
    """How an equation reads its operands in a microbatch, and the placements of its results.

    A replicated operand may be read as split (its part is taken) or as a sum (the first microbatch
    has it, others have zeros). `factor` is the factor of the rule that the batch runs along.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: str | None = None


def operator_reading(
    eqn: JaxprEqn, operands: Sequence[Placement], num_microbatches: int
) -> Reading:
    """Return how `eqn`, no region, runs in microbatches; MixedError if it cannot."""
    kinds = {operand.kind for operand in operands}
    operator = operator_of(eqn)
    if kinds <= {"replicated"}:
        zero = _is_zero(operator, eqn, operands)
        return Reading(tuple(operands), (evolve(REPLICATED, zero=zero),) * len(eqn.outvars))
    if operator.passes_on:
        return Reading(tuple(operands), tuple(operands))
    if "split" in kinds:
        return _along_batch(eqn, operator, operands, num_microbatches)
    if "extreme" in kinds:
        return _of_extremes(eqn, operator, operands)
    return _of_sums(eqn, operator, operands)


def replicated_as_split(
    eqn: JaxprEqn, result: int, dim: int, num_microbatches: int
) -> Reading | None:
    """Return how an equation of replicated operands makes only a microbatch's part along `dim` of a
    result; None if it must be made whole.
    """
    rule = sharding_rule(eqn)
    if rule is None or eqn.effects or not rule.results[result][dim]:
        return None
    name = rule.results[result][dim][0]
    factor = rule.factor(name)
    if factor.kind != "parallel" or factor.size % num_microbatches:
        return None
    operands = [_place(dims, name, REPLICATED) for dims in rule.operands]
    results = [_place(dims, name, None) for dims in rule.results]
    found = [placement for placement in (*operands, *results) if placement is not None]
    if len(found) < len(operands) + len(results):
        return None
    return Reading(tuple(found[: len(operands)]), tuple(found[len(operands) :]), name)


def _place(
    dims: Sequence[tuple[str, ...]], factor: str, otherwise: Placement | None
) -> Placement | None:
    """Return the split along the one dim whose major factor is `factor`; None if there is none such
    though the factor occurs, `otherwise` if it does not.
    """
    homes = [d for d, names in enumerate(dims) if factor in names]
    if not homes:
        return otherwise
    return split(homes[0]) if len(homes) == 1 and dims[homes[0]][0] == factor else None


def _along_batch(
    eqn: JaxprEqn, operator: Operator, operands: Sequence[Placement], num_microbatches: int
) -> Reading:
    """Return how an operator runs whose operands are split along the batch."""
    rule = sharding_rule(eqn)
    if rule is None:
        raise MixedError(eqn)
    names = {
        dims[operand.dim][0] if dims[operand.dim] else ""
        for operand, dims in zip(operands, rule.operands, strict=True)
        if operand.kind == "split"
    }
    name = names.pop()
    if names or not name:
        raise MixedError(eqn)
    factor = rule.factor(name)
    if factor.kind in ("replicate", "permutation") or factor.size % num_microbatches:
        raise MixedError(eqn)
    if _selects_examples(operator, rule, name):
        raise MixedError(eqn)
    read = []
    for operand, dims in zip(operands, rule.operands, strict=True):
        wanted = _place(dims, name, REPLICATED)
        if wanted is None or operand.kind not in ("replicated", "split"):
            raise MixedError(eqn)
        read.append(wanted)
    combined = _combined(factor.reduction) if factor.kind == "reduction" else None
    results = []
    for dims in rule.results:
        result = _place(dims, name, combined)
        if result is None:
            raise MixedError(eqn)
        results.append(result)
    return Reading(tuple(read), tuple(results), name)


def _combined(reduction: str) -> Placement | None:
    if reduction == "add":
        return SUM
    if reduction in _EXTREMES:
        return Placement("extreme", reduction=_EXTREMES[reduction])
    return None


def _selects_examples(operator: Operator, rule: ShardingRule, factor: str) -> bool:
    """Return whether an operator reads or writes at computed places along the batch.

    `x[0]` of a batch is one example, which one microbatch has. What is written along the batch must
    bring a value for each example.
    """
    if operator.written is not None:
        return all(factor not in dim for dim in rule.operands[operator.written])
    return operator.indices is not None and rule.factor(factor).kind == "reduction"


def _of_extremes(eqn: JaxprEqn, operator: Operator, operands: Sequence[Placement]) -> Reading:
    """Return how an operator runs on extremes: one that keeps their order, or takes another."""
    found = {operand for operand in operands if operand.kind == "extreme"}
    others = {operand.kind for operand in operands} - {"extreme"}
    if len(found) != 1 or not others <= {"replicated"}:
        raise MixedError(eqn)
    (extreme,) = found
    alone = len(operands) == 1 and operator.order_survives(eqn)
    if not alone and extreme_taken(eqn) != extreme.reduction:
        raise MixedError(eqn)
    return Reading(tuple(operands), (extreme,) * len(eqn.outvars))


def _of_sums(eqn: JaxprEqn, operator: Operator, operands: Sequence[Placement]) -> Reading:
    """Return how an operator runs on parts of sums: one that is linear in them together."""
    sums = {k for k, operand in enumerate(operands) if operand.kind == "sum"}
    for group in operator.linear_groups(eqn):
        if sums <= set(group) and operator.sums_survive(eqn):
            read = [
                SUM if k in group and not operand.zero else operand
                for k, operand in enumerate(operands)
            ]
            return Reading(tuple(read), (SUM,) * len(eqn.outvars))
    raise MixedError(eqn)


def _is_zero(operator: Operator, eqn: JaxprEqn, operands: Sequence[Placement]) -> bool:
    """Return whether a result is zero, as all operands of one linear group are."""
    groups = operator.linear_groups(eqn)
    return any(bool(group) and all(operands[k].zero for k in group) for group in groups)
