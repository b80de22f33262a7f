"""What an elementwise operator gives where only some of its operands are known numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from alpa_meta.compat import JaxprEqn, dtype_of

_Rests = Sequence[float | None]


def of_some(eqn: JaxprEqn, known: Sequence[float | None]) -> float | None:
    """Return the result of an operator of two operands, given those that are known (None: any
    finite number); None if it depends on the others."""
    found = _OF_SOME.get(eqn.primitive.name)
    logical = eqn.primitive.name in _LOGICAL
    if found is None or (logical and dtype_of(eqn.outvars[0]) != np.bool_):
        return None
    return found(known)


def _absorbed(by: float) -> Callable[[_Rests], float | None]:
    return lambda known: by if by in known else None


def _infinite(known: _Rests) -> float | None:
    return next((one for one in known if one is not None and math.isinf(one)), None)


def _subtracted(known: _Rests) -> float | None:
    first, second = known
    if first is not None and math.isinf(first):
        return first
    return -second if second is not None and math.isinf(second) else None


def _told_apart(answer: float) -> Callable[[_Rests], float | None]:
    """An infinite number is not equal to a finite one, as the largest score of a row is."""
    return lambda known: answer if _infinite(known) is not None else None


_LOGICAL = ("and", "or")
_OF_SOME: Mapping[str, Callable[[_Rests], float | None]] = {
    "and": _absorbed(0.0),
    "or": _absorbed(1.0),
    "min": _absorbed(-math.inf),
    "add": _infinite,
    "add_any": _infinite,
    "sub": _subtracted,
    "eq": _told_apart(0.0),
    "ne": _told_apart(1.0),
}
