"""How every value of a training step scales with the batch, found from the program alone.

The step is traced at two batch sizes; both jaxprs have the same equations, and what differs tells
which dims and which literals grow with the batch. Following the batch dim through the
sharding rules then gives each value one of these forms:

    constant  does not depend on the batch's data
    example   has a batch dim; every slice along it depends on its own examples only
    reduced   a sum over examples of example values, times N^power (N: examples in the batch)
    extreme   a maximum or minimum over examples
    mixed     anything else (batch statistics, ratios of sums, random numbers shaped by the batch)

A step cut into B microbatches is exact when no mixed value crosses from the microbatches to the
update: a reduced value of the whole batch is the sum of the microbatch values times B^power, so a
mean loss (power -1) is averaged and a summed loss (power 0) is summed.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from attrs import evolve, frozen

from alpa_meta.compat import (
    Literal,
    closed,
    consts,
    is_drop,
    open_jaxpr,
    scan_counts,
)
from alpa_meta.microbatch.places import adds_to_operand, same_constant, selects_examples
from alpa_meta.operators import Operator, operator_of, sharding_rule
from alpa_meta.operators.operator import Groups
from alpa_meta.operators.regions import bodies, fold, is_region


@frozen
class Scaling:
    """Form of a value, the power of N in it, and the batch dim of an example value.

    `reduction` is "max" or "min" for an extreme.
    """

    form: str
    power: int = 0
    dim: int = -1
    zero: bool = False  # identically zero: agrees with every power
    reduction: str = "add"


CONSTANT = Scaling("constant")
MIXED = Scaling("mixed")

_EXTREMES = {"max": "max", "or": "max", "min": "min", "and": "min"}


def batch_scaling(
    small: Any, large: Any, inputs: Sequence[Scaling], ratio: float = 2
) -> dict[Any, Scaling]:
    """Return the scaling of every variable of `small`, the jaxpr at batch size b.

    `large` is the same step at `ratio` times b, `inputs` the scalings of its inputs. When the two
    programs do not correspond, every value that is not an input is mixed.
    """
    known: dict[Any, Scaling] = {}
    _follow(small, large, inputs, known, ratio)
    return known


def _follow(
    small: Any, large: Any, inputs: Sequence[Scaling], known: dict[Any, Scaling], ratio: float
) -> list[Scaling]:
    first, second = open_jaxpr(small), open_jaxpr(large)
    known.update(zip(first.invars, inputs, strict=True))
    closed_over = zip_longest(consts(small), consts(large))
    for var, (one, other) in zip(first.constvars, closed_over, strict=False):
        known[var] = CONSTANT if same_constant(one, other) else MIXED
    matching = len(first.eqns) == len(second.eqns)
    for position, eqn in enumerate(first.eqns):
        twin = second.eqns[position] if matching else None
        if twin is not None and twin.primitive is not eqn.primitive:
            twin = None
        if twin is None:
            results = [MIXED] * len(eqn.outvars)
        else:
            operands = [
                _read(atom, other, known, ratio)
                for atom, other in zip(eqn.invars, twin.invars, strict=True)
            ]
            results = _results(eqn, twin, operands, known, ratio)
        known.update(
            (var, result)
            for var, result in zip(eqn.outvars, results, strict=True)
            if not is_drop(var)
        )
    return [
        _read(atom, other, known, ratio)
        for atom, other in zip(first.outvars, second.outvars, strict=True)
    ]


def _read(atom: Any, twin: Any, known: dict[Any, Scaling], ratio: float) -> Scaling:
    if not isinstance(atom, Literal):
        return known.get(atom, MIXED)
    if not isinstance(twin, Literal):
        return CONSTANT
    if np.ndim(atom.val):
        return CONSTANT if same_constant(atom.val, twin.val) else MIXED
    value, other = np.asarray(atom.val), np.asarray(twin.val)
    if value.dtype.kind not in "iufc" and value.dtype.name != "bfloat16":
        return CONSTANT
    one, two = complex(value), complex(other)
    if one == two or not (cmath.isfinite(one) and cmath.isfinite(two)):
        return Scaling("constant", zero=one == 0.0)
    growth = two / one if one else 0j
    if growth.imag or growth.real <= 0.0:
        return MIXED
    power = math.log(growth.real, ratio)
    return Scaling("constant", power=round(power)) if abs(power - round(power)) < 1e-3 else MIXED


def _results(
    eqn: Any, twin: Any, operands: list[Scaling], known: dict[Any, Scaling], ratio: float
) -> list[Scaling]:
    operator = operator_of(eqn)
    count = len(eqn.outvars)
    if any(operand.form == "mixed" for operand in operands):
        return [MIXED] * count
    if is_region(eqn):
        return _region(eqn, twin, operands, known, ratio)
    places = operator.indices(eqn) if operator.indices else ()
    if any(operands[k].power for k in places) or not _same_operator(eqn, twin):
        return [MIXED] * count  # another place, or another operator, in every microbatch
    if operator.passes_on:
        return operands
    grows = [
        _growing_dims(var, other) for var, other in zip(eqn.outvars, twin.outvars, strict=True)
    ]
    if all(operand.form == "constant" for operand in operands):
        return _from_constants(eqn, operator, operands, grows)
    rule = sharding_rule(eqn)
    if rule is None:
        return [MIXED] * count
    groups = operator.linear_groups(eqn)
    if len(groups) == 1 and len(groups[0]) == len(operands) and _mean_plus_constant(operands):
        return [Scaling("reduced", -1)] * count
    power = _power(operator, groups, operands)
    if power is None:
        return [MIXED] * count
    zero = _is_zero(groups, operands)
    if any(operand.form in ("reduced", "extreme") for operand in operands):
        return _from_reduced(eqn, operator, groups, operands, power)
    batch_factors = set()
    for operand, dims, atom in zip(operands, rule.operands, eqn.invars, strict=True):
        if operand.form != "example":
            continue
        if not dims[operand.dim]:
            size_one = atom.aval.shape[operand.dim] == 1
            if not size_one:
                return [MIXED] * count
            continue
        batch_factors.add(dims[operand.dim][0])
    if len(batch_factors) != 1:
        return [MIXED] * count
    factor = batch_factors.pop()
    kind = rule.factor(factor)
    if kind.kind in ("replicate", "permutation") or selects_examples(operator, rule, factor):
        return [MIXED] * count
    if adds_to_operand(operator, rule, factor) and not operands[0].zero:
        return [MIXED] * count
    for operand, dims in zip(operands, rule.operands, strict=True):
        holds = any(factor in dim for dim in dims)
        if holds and operand.form == "constant" and not operand.zero:
            return [MIXED] * count
    results = []
    for dims, growing in zip(rule.results, grows, strict=True):
        home = tuple(dim for dim, names in enumerate(dims) if names and names[0] == factor)
        if home and home == growing:
            results.append(Scaling("example", power, home[0], zero))
        elif home or growing:
            results.append(MIXED)
        elif kind.kind == "reduction" and kind.reduction == "add":
            results.append(Scaling("reduced", power))
        elif kind.kind == "reduction" and kind.reduction in ("max", "min", "and", "or"):
            extreme = Scaling("extreme", reduction=_EXTREMES[kind.reduction])
            results.append(extreme if power == 0 else MIXED)
        else:
            results.append(MIXED)
    return results


def _same_operator(eqn: Any, twin: Any) -> bool:
    """Return whether numbers in the parameters of two equations are the same, but for the batch:
    `w[x.shape[0] // 2]` and `w ** x.shape[0]` are not."""
    growing = set(_growing_dims(eqn.invars[0], twin.invars[0])) if eqn.invars else set()
    grows = any(map(_growing_dims, (*eqn.invars, *eqn.outvars), (*twin.invars, *twin.outvars)))
    for name, value in eqn.params.items():
        other = twin.params[name]
        if isinstance(value, int) and value != other:
            return False
        if not isinstance(value, tuple) or not isinstance(other, tuple) or value == other:
            continue
        if not all(isinstance(one, int | tuple) for one in (*value, *other)):
            continue
        if not grows:
            return False
        by_dim = operator_of(eqn).params_by_dim
        pairs = enumerate(zip(value, other, strict=True)) if by_dim else ()
        if any(one != two for dim, (one, two) in pairs if dim not in growing):
            return False
    return True


def _mean_plus_constant(operands: list[Scaling]) -> bool:
    """Return whether a mean over the batch meets a constant: the average of such sums is exact."""
    kinds = {(operand.form, operand.power) for operand in operands}
    return kinds == {("reduced", -1), ("constant", 0)}


def _growing_dims(var: Any, twin: Any) -> tuple[int, ...]:
    one, two = getattr(var.aval, "shape", ()), getattr(twin.aval, "shape", ())
    return tuple(dim for dim, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)


def _from_constants(
    eqn: Any, operator: Operator, operands: list[Scaling], grows: list[tuple[int, ...]]
) -> list[Scaling]:
    groups = operator.linear_groups(eqn)
    power = _power(operator, groups, operands)
    if power is None:
        return [MIXED] * len(grows)
    zero = _is_zero(groups, operands)
    results = []
    for growing in grows:
        if not growing:
            results.append(Scaling("constant", power, zero=zero))
        elif len(growing) > 1 or operator.positional(eqn, growing[0]):
            results.append(MIXED)
        else:
            results.append(Scaling("example", power, growing[0], zero))
    return results


def _from_reduced(
    eqn: Any, operator: Operator, groups: Groups, operands: list[Scaling], power: int
) -> list[Scaling]:
    """Return the scaling of results of sums over the batch, or of extremes, and of constants."""
    count = len(eqn.outvars)
    forms = {operand.form for operand in operands if not operand.zero}
    if "example" in forms or "extreme" in forms and len(forms) > 1:
        return [MIXED] * count
    if forms <= {"extreme"}:
        keeps = len(operands) == 1 and operator.order_survives(eqn)
        return [operands[0] if keeps else MIXED] * count
    reduced = {k for k, operand in enumerate(operands) if operand.form == "reduced"}
    in_one = [
        group
        for group in groups
        if reduced <= set(group) and all(k in reduced or operands[k].zero for k in group)
    ]
    return [Scaling("reduced", power) if in_one and operator.sums_survive(eqn) else MIXED] * count


def _power(operator: Operator, groups: Groups, operands: list[Scaling]) -> int | None:
    """Return the power of N of the result, or None when operands of unlike powers are combined."""
    total, rest = 0, set(range(len(operands)))
    for group in groups:
        live = {operands[k].power for k in group if not operands[k].zero}
        if len(live) > 1:
            return None
        total += sum(live)
        rest.difference_update(group)
    for k in operator.inverse_in:
        total -= operands[k].power
        rest.discard(k)
    if operator.indices is None and any(operands[k].power for k in rest):
        return None
    return total


def _is_zero(groups: Groups, operands: list[Scaling]) -> bool:
    """Return whether a result is zero, as all operands of one group are."""
    return any(all(operands[k].zero for k in group) for group in groups)


def _region(
    eqn: Any, twin: Any, operands: list[Scaling], known: dict[Any, Scaling], ratio: float
) -> list[Scaling]:
    pairs = list(zip(bodies(eqn), bodies(twin), strict=True))
    return fold(
        eqn,
        scan=lambda: _scan(eqn, twin, *pairs[0], operands, known, ratio),
        loop=lambda: _while(eqn, twin, operands, known, ratio),
        branches=lambda: _branches(pairs, operands, len(eqn.outvars), known, ratio),
        remat=lambda: _follow(*pairs[0], operands, known, ratio),
    )


def _branches(
    pairs: Sequence[tuple[Any, Any]],
    operands: list[Scaling],
    count: int,
    known: dict[Any, Scaling],
    ratio: float,
) -> list[Scaling]:
    predicate, *rest = operands
    if predicate.form != "constant":
        return [MIXED] * count
    branches = [_follow(body, other, rest, known, ratio) for body, other in pairs]
    return [_join(results) for results in zip(*branches, strict=True)]


def _while(
    eqn: Any, twin: Any, operands: list[Scaling], known: dict[Any, Scaling], ratio: float
) -> list[Scaling]:
    """Return the scaling of a loop's carries: all mixed unless every microbatch makes the same
    number of trips."""
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test_consts, body_consts = operands[:num_test], operands[num_test : num_test + num_body]

    def follow(name: str, values: list[Scaling]) -> list[Scaling]:
        body, other = closed(eqn.params[name]), closed(twin.params[name])
        return _follow(body, other, values, known, ratio)

    carry, _ = _settled(
        lambda carry: follow("body_jaxpr", [*body_consts, *carry]),
        operands[num_test + num_body :],
    )
    (proceeds,) = follow("cond_jaxpr", [*test_consts, *carry])
    return carry if proceeds.form == "constant" else [MIXED] * len(carry)


def _settled(
    follow: Callable[[list[Scaling]], list[Scaling]], carry: Sequence[Scaling]
) -> tuple[list[Scaling], list[Scaling]]:
    """Return the scaling of a loop's carries, which a further trip keeps, and of its other results.

    `follow` returns the results of a trip, the carries first.
    """
    carry = list(carry)
    while True:
        results = follow(carry)
        joined = [_join(pair) for pair in zip(carry, results[: len(carry)], strict=True)]
        if joined == carry:
            return carry, results[len(carry) :]
        carry = [
            one if one == before or before.form == "constant" or before.zero else MIXED
            for before, one in zip(carry, joined, strict=True)
        ]


def _scan(
    eqn: Any,
    twin: Any,
    body: Any,
    other: Any,
    operands: list[Scaling],
    known: dict[Any, Scaling],
    ratio: float,
) -> list[Scaling]:
    if eqn.params["length"] != twin.params["length"]:
        return [MIXED] * len(eqn.outvars)
    num_consts, num_carry, _ = scan_counts(eqn)
    xs = [_shifted(operand, -1) for operand in operands[num_consts + num_carry :]]
    carry, ys = _settled(
        lambda carry: _follow(body, other, [*operands[:num_consts], *carry, *xs], known, ratio),
        operands[num_consts : num_consts + num_carry],
    )
    return [*carry, *(_shifted(result, +1) for result in ys)]


def _shifted(scaling: Scaling, by: int) -> Scaling:
    if scaling.form != "example":
        return scaling
    return MIXED if scaling.dim + by < 0 else evolve(scaling, dim=scaling.dim + by)


def _join(scalings: Sequence[Scaling]) -> Scaling:
    """Return the scaling that covers all of `scalings`: where control flow meets."""
    live = [scaling for scaling in scalings if not scaling.zero] or list(scalings)
    joined = live[0]
    for scaling in live[1:]:
        if scaling == joined:
            continue
        forms = {scaling.form, joined.form}
        if forms == {"constant", "example"} and scaling.power == joined.power:
            joined = scaling if scaling.form == "example" else joined
        elif forms == {"constant", "reduced"}:
            return MIXED
        else:
            return MIXED
    if joined.form == "constant":
        for scaling in scalings:
            if scaling.zero and scaling.form == "example":
                return scaling
    return evolve(joined, zero=all(scaling.zero for scaling in scalings))
