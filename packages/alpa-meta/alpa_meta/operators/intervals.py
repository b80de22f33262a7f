"""What an operator makes of intervals: bounds of its results where those of its operands are known.

On the diagonal of a mask, where the row is the key, both positions are one p: a value there is
slope * p + [low, high], so that comparisons of positions are settled for every p at once. In blocks
of B tokens the number of the block is p // B, and the place in it p - B (p // B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from attrs import evolve, frozen

from alpa_meta.compat import JaxprEqn, dtype_of
from alpa_meta.types import DType, Function


@frozen
class Interval:
    """slope * p + sum of c (p // B) + [low, high] for every p from 0 to `last`; `blocks` has the
    pairs (B, c)."""

    low: float = -math.inf
    high: float = math.inf
    slope: float = 0.0
    last: int = 0
    blocks: tuple[tuple[int, float], ...] = ()

    @property
    def constant(self) -> float | None:
        """The one value that it holds, if it holds one."""
        return self.low if self.low == self.high and not self.slope and not self.blocks else None

    def flat(self) -> Interval:
        """Return the interval for all p together."""
        parts = [self.slope * self.last, *(c * (self.last // size) for size, c in self.blocks)]
        if len(self.blocks) == 1 and self.blocks[0][1] == -self.slope * self.blocks[0][0]:
            parts = [self.slope * min(self.blocks[0][0] - 1, self.last)]  # the place in a block
        low, high = (sum(extreme(0.0, part) for part in parts) for extreme in (min, max))
        return Interval(self.low + low, self.high + high, 0.0, self.last)

    def scaled(self, factor: float) -> Interval:
        """Return a multiple of it."""
        ends = sorted((self.low * factor, self.high * factor))
        blocks = tuple((size, factor * c) for size, c in self.blocks)
        return Interval(ends[0], ends[1], self.slope * factor, self.last, blocks)


UNKNOWN = Interval()
_TRUE, _FALSE, _EITHER = Interval(1.0, 1.0), Interval(0.0, 0.0), Interval(0.0, 1.0)


def results_of(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    """Return the bounds of the first result of `eqn`."""
    function = _FUNCTIONS.get(eqn.primitive.name)
    found = UNKNOWN
    if function is not None and eqn.outvars:
        found = function(eqn, operands)
    if math.isnan(found.low) or math.isnan(found.high):
        found = UNKNOWN
    elif eqn.primitive.name in _WRAPPING and not _fits(dtype_of(eqn.outvars[0]), found.flat()):
        found = UNKNOWN
    return found if found != UNKNOWN else of_type(dtype_of(eqn.outvars[0]))


def _fits(dtype: DType, found: Interval) -> bool:
    """Return whether no integer of an interval wraps around in a type; what has no bound is taken
    for a number that does not, but for unsigned types, whose differences often do."""
    if jnp.issubdtype(dtype, jnp.unsignedinteger) and found.low < 0:
        return False
    return not jnp.issubdtype(dtype, jnp.integer) or all(
        holds_exactly(dtype, end) for end in (found.low, found.high)
    )


def of_equals(eqn: JaxprEqn) -> Interval | None:
    """Return the first result of `eqn` of two equal operands, where that is the same for all."""
    if eqn.primitive.name not in _OF_DIFFERENCES:
        return None
    whole = not jnp.issubdtype(dtype_of(eqn.invars[0]), jnp.inexact)  # nan is unequal to itself
    return results_of(eqn, [Interval(0.0, 0.0)] * 2) if whole else None


def of_type(dtype: DType) -> Interval:
    """Return the bounds of every value of a type."""
    return _EITHER if dtype == np.bool_ else UNKNOWN


def holds_exactly(dtype: DType, number: float) -> bool:
    """Return whether a type holds an integer of this size, and all smaller ones, without rounding;
    infinity, which stands for no bound, it does."""
    if math.isinf(number) or dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.floating):
        limits = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
        return bool(abs(number) <= 2.0 ** (limits.nmant + 1))
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return bool(bounds.min <= number <= bounds.max)
    return False


def hull(found: Sequence[Interval]) -> Interval:
    """Return the least interval that holds all of these."""
    if len({(one.slope, one.blocks) for one in found}) > 1:
        found = [one.flat() for one in found]
    low, high = min(one.low for one in found), max(one.high for one in found)
    return evolve(found[0], low=low, high=high)


def _same(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    return operands[0]


def _all(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    return hull(operands)


def _added(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    one, two = operands
    last = max(one.last, two.last)
    blocks = dict(one.blocks)
    for size, c in two.blocks:
        blocks[size] = blocks.get(size, 0.0) + c
    kept = tuple(sorted((size, c) for size, c in blocks.items() if c))
    return Interval(one.low + two.low, one.high + two.high, one.slope + two.slope, last, kept)


def _negated(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    (one,) = operands
    return one.scaled(-1.0)


def _subtracted(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    return _added(eqn, [operands[0], _negated(eqn, operands[1:])])


def _multiplied(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    one, two = operands
    if one.constant is not None:
        one, two = two, one
    factor = two.constant
    if factor == 0.0:
        return UNKNOWN if math.isinf(one.constant or 0.0) else Interval(0.0, 0.0)
    if factor is not None and math.isfinite(factor):
        return one.scaled(factor)
    one, two = one.flat(), two.flat()
    products = [a * b for a in (one.low, one.high) for b in (two.low, two.high)]
    return UNKNOWN if any(map(math.isnan, products)) else Interval(min(products), max(products))


def _divided(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    one, divisor = operands[0].flat(), operands[1].constant
    if not divisor or not math.isfinite(divisor):
        return UNKNOWN
    ends = sorted((one.low / divisor, one.high / divisor))
    if np.issubdtype(dtype_of(eqn.outvars[0]), np.integer):
        ends = [math.trunc(end) if math.isfinite(end) else end for end in ends]
    return Interval(ends[0], ends[1])


def _remainder(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    one, divisor = operands[0].flat(), operands[1].constant
    if not divisor or divisor < 0:
        return UNKNOWN
    if 0 <= one.low and one.high < divisor:
        return one
    return Interval(0.0 if one.low >= 0 else -divisor, divisor)


def _sign(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    one = operands[0].flat()
    return Interval(float(np.sign(one.low)), float(np.sign(one.high)))


def _extreme(combine: Function[float]) -> Function[Interval]:
    def of(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
        one, two = (operand.flat() for operand in operands)
        return Interval(combine(one.low, two.low), combine(one.high, two.high))

    return of


def _clamped(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    least, one, most = (operand.flat() for operand in operands)
    low, high = max(least.low, one.low), max(least.high, one.high)
    return Interval(min(low, most.low), min(high, most.high))


def _compared(holds: Callable[[float], bool], fails: Callable[[float], bool]) -> Function[Interval]:
    """Return a comparison that `holds` of the low end, or `fails` of the high end, of x - y."""

    def of(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
        difference = _subtracted(eqn, operands).flat()
        if holds(difference.low):
            return _TRUE
        return _FALSE if fails(difference.high) else _EITHER

    return of


def _swapped(comparison: Function[Interval]) -> Function[Interval]:
    return lambda eqn, operands: comparison(eqn, operands[::-1])


def _equal(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    one, two = (operand.flat() for operand in operands)
    if one.low > two.high or one.high < two.low:
        return _FALSE
    difference = _subtracted(eqn, operands).flat()
    return _TRUE if difference.low == difference.high == 0 else _EITHER


def _not(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    if dtype_of(eqn.outvars[0]) != np.bool_:
        return UNKNOWN
    return Interval(1.0 - operands[0].high, 1.0 - operands[0].low)


def _unequal(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    equal = _equal(eqn, operands)
    return Interval(1.0 - equal.high, 1.0 - equal.low)


def _truth(combine: Function[float]) -> Function[Interval]:
    def of(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
        if dtype_of(eqn.outvars[0]) != np.bool_:
            return UNKNOWN
        lows, highs = [one.low for one in operands], [one.high for one in operands]
        return Interval(combine(lows), combine(highs))

    return of


def _chosen(_: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    which = operands[0].constant
    return operands[1 + int(which)] if which is not None else hull(operands[1:])


def _converted(eqn: JaxprEqn, operands: Sequence[Interval]) -> Interval:
    source, target = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    (one,) = operands
    if target == np.bool_ and source != np.bool_:
        return _unequal(eqn, [one, Interval(0.0, 0.0)])
    ends, whole = one.flat(), source == np.bool_ or np.issubdtype(source, np.integer)
    if not whole or one.constant is not None and jnp.issubdtype(target, jnp.floating):
        return one if jnp.issubdtype(target, jnp.floating) else UNKNOWN
    return one if holds_exactly(target, ends.low) and holds_exactly(target, ends.high) else UNKNOWN


_at_least = _compared(lambda low: low >= 0, lambda high: high < 0)
_above = _compared(lambda low: low > 0, lambda high: high <= 0)

_WRAPPING = ("add", "sub", "neg", "mul")
_OF_DIFFERENCES = ("sub", "eq", "ne", "ge", "gt", "le", "lt")

_FUNCTIONS: dict[str, Callable[[JaxprEqn, Sequence[Interval]], Interval]] = {
    **dict.fromkeys(
        (
            *("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "split"),
            *("dynamic_slice", "copy", "copy_p", "stop_gradient"),
            *("reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        ),
        _same,
    ),
    **dict.fromkeys(("concatenate", "stack", "pad"), _all),
    **dict.fromkeys(("add", "add_any"), _added),
    "sub": _subtracted,
    "neg": _negated,
    "mul": _multiplied,
    "div": _divided,
    "rem": _remainder,
    "sign": _sign,
    "max": _extreme(max),
    "min": _extreme(min),
    "clamp": _clamped,
    "ge": _at_least,
    "gt": _above,
    "le": _swapped(_at_least),
    "lt": _swapped(_above),
    "eq": _equal,
    "ne": _unequal,
    "not": _not,
    "and": _truth(min),
    "or": _truth(max),
    "select_n": _chosen,
    "convert_element_type": _converted,
}
