"""Where the microbatches hold a value, and how one operator runs on what a microbatch holds.

A step cut into microbatches is the step of the whole batch on a virtual mesh axis that is walked in
time instead of along devices. Every value has one of the placements of such an axis (the words are
those of PyTorch's DTensor; Shardy says replicated, sharded, unreduced):

    replicated  the same in every microbatch
    split       each microbatch has its own part along `dim`; where the batch is merged behind
                another dim, as in time-major [T * N], a part of each of `outer` blocks
    sum         each has a part of a sum; the value is the sum over the microbatches
    extreme     the value is the largest ("max") or smallest ("min") over the microbatches
    mixed       none of these: no microbatch can compute its share alone
    own         in a scan over the examples, of which a microbatch makes its part of the iterations:
                what an iteration makes of its own examples
    running     in such a scan, what is handed on as its carry `dim`: a sum to which every iteration
                adds its own

So a microbatch runs the local form of each operator, as a device does on its shard, and what the
factors of the sharding rule say of devices holds for microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve, frozen

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, shape_of
from alpa_meta.operators import Operator, operator_of, sharding_rule
from alpa_meta.operators.cutting import moved_blocks
from alpa_meta.operators.elementwise import addends, extreme_taken


@frozen
class Placement:
    """How the microbatches hold a value; `zero` says that it is known to be zero everywhere."""

    kind: str
    dim: int = -1  # of "split" and "running"
    outer: int = 1  # of "split"
    reduction: str = "add"  # "max" or "min" of "extreme"
    zero: bool = False


REPLICATED = Placement("replicated")
SUM = Placement("sum")
MIXED = Placement("mixed")
OWN = Placement("own")

_EXTREMES = {"max": "max", "or": "max", "min": "min", "and": "min"}


def split(dim: int, outer: int = 1) -> Placement:
    """Return the placement of values split along `dim`."""
    return Placement("split", dim, outer)


class MixedError(Exception):
    """An operator of this equation cannot run in microbatches on what it reads."""

    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__(eqn.primitive.name)
        self.eqn = eqn


@frozen
class Reading:
    """How an equation reads its operands in a microbatch, and the placements of its results.

    A replicated operand may be read as split (its part is taken) or as a sum (the first microbatch
    has it, others have zeros). `factor` is the factor of the rule that the batch runs along;
    `blocks_along` the dim along which the equation moves whole blocks of the batch.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: str | None = None
    blocks_along: int | None = None


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
    if kinds & {"own", "running"}:
        return _in_scan_of_examples(eqn, operator, operands)
    if "split" in kinds:
        moved = moving_blocks(eqn, operands)
        if moved is not None:
            return moved
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
    if rule is None or eqn.effects:
        return None
    run = batch_run(rule, rule.results[result][dim], 1, num_microbatches)
    if run is None or rule.factor(run.factor).kind != "parallel":
        return None
    operands = [placed(rule, dims, run, REPLICATED) for dims in rule.operands]
    results = [placed(rule, dims, run, None) for dims in rule.results]
    found = [placement for placement in (*operands, *results) if placement is not None]
    if len(found) < len(operands) + len(results):
        return None
    return Reading(tuple(found[: len(operands)]), tuple(found[len(operands) :]), run.factor)


@frozen
class BatchRun:
    """The batch along a factor of a rule: behind `outer` blocks of it."""

    factor: str
    outer: int


def batch_run(
    rule: ShardingRule, dim: Sequence[str], outer: int, num_microbatches: int
) -> BatchRun | None:
    """Return the factor of a dim that the batch runs along behind `outer` blocks of the dim; None
    if it begins in no factor, or if the microbatches do not divide what is left of it.
    """
    before = 1
    for name in dim:
        size = rule.factor(name).size
        if outer % before == 0 and outer // before < size:
            own = outer // before
            return BatchRun(name, own) if size % (own * num_microbatches) == 0 else None
        before *= size
    return None


def placed(
    rule: ShardingRule,
    dims: Sequence[tuple[str, ...]],
    run: BatchRun,
    otherwise: Placement | None,
) -> Placement | None:
    """Return the split along the one dim with the batch's factor; None if there are several,
    `otherwise` if there is none.
    """
    homes = [d for d, names in enumerate(dims) if run.factor in names]
    if len(homes) != 1:
        return None if homes else otherwise
    names = dims[homes[0]]
    before = math.prod(rule.factor(name).size for name in names[: names.index(run.factor)])
    return split(homes[0], before * run.outer)


def _along_batch(
    eqn: JaxprEqn, operator: Operator, operands: Sequence[Placement], num_microbatches: int
) -> Reading:
    """Return how an operator runs whose operands are split along the batch."""
    rule = sharding_rule(eqn)
    if rule is None:
        raise MixedError(eqn)
    runs = {
        batch_run(rule, dims[operand.dim], operand.outer, num_microbatches)
        for operand, dims in zip(operands, rule.operands, strict=True)
        if operand.kind == "split"
    }
    run = runs.pop()
    if runs or run is None:
        raise MixedError(eqn)
    factor = rule.factor(run.factor)
    if factor.kind in ("replicate", "permutation") or run.outer > 1 and operator.in_blocks:
        raise MixedError(eqn)
    if _selects_examples(operator, rule, run.factor):
        raise MixedError(eqn)
    read = []
    for operand, dims in zip(operands, rule.operands, strict=True):
        wanted = placed(rule, dims, run, REPLICATED)
        if wanted is None or operand.kind not in ("replicated", "split"):
            raise MixedError(eqn)
        read.append(wanted)
    combined = _combined(factor.reduction) if factor.kind == "reduction" else None
    if operator.steers:
        combined = REPLICATED
    results = []
    for dims in rule.results:
        result = placed(rule, dims, run, combined)
        if result is None:
            raise MixedError(eqn)
        results.append(result)
    return Reading(tuple(read), tuple(results), run.factor)


def moving_blocks(eqn: JaxprEqn, operands: Sequence[Placement | None]) -> Reading | None:
    """Return how an equation runs that puts batches one behind the other, as the chosen and the
    rejected answers of preference learning, or takes them apart again; None if it does not.

    A microbatch has its part of each of them, and of zeros among them, and moves these.
    """
    split_ones = {
        (one.dim, shape_of(atom)[one.dim] // one.outer)
        for one, atom in zip(operands, eqn.invars, strict=True)
        if one is not None and one.kind == "split"
    }
    if len(split_ones) != 1:
        return None
    ((dim, size),) = split_ones
    read = []
    for one, atom in zip(operands, eqn.invars, strict=True):
        if one is None or one.kind == "replicated" and not shape_of(atom):  # what pads
            one = REPLICATED
        elif one.zero and shape_of(atom)[dim] % size == 0:
            one = split(dim, shape_of(atom)[dim] // size)
        elif one.kind != "split":
            return None
        read.append(one)
    counts = moved_blocks(eqn, dim, size)
    if counts is None:
        return None
    return Reading(tuple(read), tuple(split(dim, n) for n in counts), blocks_along=dim)


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


def _in_scan_of_examples(
    eqn: JaxprEqn, operator: Operator, operands: Sequence[Placement]
) -> Reading:
    """Return how an operator runs in an iteration: on its own, or adding its own to a sum."""
    running = [k for k, operand in enumerate(operands) if operand.kind == "running"]
    if not {operand.kind for operand in operands} <= {"replicated", "own", "running"}:
        raise MixedError(eqn)
    if not running:
        return Reading(tuple(operands), (OWN,) * len(eqn.outvars))
    if len(running) > 1 or running[0] not in addends(eqn):
        raise MixedError(eqn)
    return Reading(tuple(operands), (operands[running[0]],))


def _is_zero(operator: Operator, eqn: JaxprEqn, operands: Sequence[Placement]) -> bool:
    """Return whether a result is zero, as all operands of one linear group are."""
    groups = operator.linear_groups(eqn)
    return any(bool(group) and all(operands[k].zero for k in group) for group in groups)
