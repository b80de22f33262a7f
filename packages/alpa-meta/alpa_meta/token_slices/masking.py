"""The proof that the tokens after a slice do not matter to it.

A slice reads the keys up to its end. What the whole program reads behind them must be nothing: a
value that is the same there for every row of the slice, its *rest*, is followed from the mask on.

    where(mask, scores, -inf)   a mask that is false there leaves the rest -inf
    exp(-inf - max)             0, which a sum over keys and a product with values may leave out
    max over keys               leaves out -inf
    0 * x, False and x          0, whatever x is

A mask constant that is only very low (-1e30) is taken for -inf: that is what a softmax makes of it,
unless a row has nothing but masked keys, which it would then share evenly with the keys left out.
So some key of each row must be known to be live, such as the row itself under a causal mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta import compat
from alpa_meta.compat import JaxprEqn, dtype_of
from alpa_meta.operators import operator_of
from alpa_meta.operators.absorbing import of_some
from alpa_meta.operators.elementwise import is_comparison, is_elementwise, is_selection
from alpa_meta.token_slices.places import KEY, kinds
from alpa_meta.token_slices.reading import Reading, UnreadableError

# exp of what is this far below the largest score is 0 in every type; scores are far above it
MASKED = -1e9

# what an infinite rest may really be: far below scores, and scaled by a hundredth (1/sqrt(head dim)
# is larger) still far below what exp tells from 0
_STANDS_FOR = 1e7

UNITS = {"add": 0.0, "max": -math.inf, "min": math.inf, "or": 0.0, "and": 1.0}
"""What a reduction of each kind may leave out."""


def as_rest(value: float, dtype: Any) -> float:
    """Return a constant of a mask, infinite if it is as good as that."""
    low = MASKED
    if jnp.issubdtype(dtype, jnp.floating):
        limits = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
        low = max(low, 0.5 * float(limits.min))
    if value <= low:
        return -math.inf
    return math.inf if value >= -low else value


def rest_of(eqn: JaxprEqn, reading: Reading, rests: Sequence[float | None]) -> float | None:
    """Return the rest of the first result, given those of the operands (None: anything finite).

    The rest of an operand without keys is its value, if that is one known number. Raises
    UnreadableError if keys are reduced whose rest matters.
    """
    if operator_of(eqn).causal is not None:
        return None
    found = _rest_of(eqn, reading, rests)
    if reading.reduced_keys:
        needed = UNITS.get(reading.reduced_keys)
        product = len([layout for layout in reading.operands if KEY in kinds(layout)]) > 1
        held = _zero_of_groups(eqn, rests) if product else _of_keys(reading, rests)
        if needed is None or held != needed:
            raise UnreadableError(
                "reads tokens after its own, which no mask was proved to leave out (it must find "
                f"{_word(needed)} there, and finds {_word(held)})"
            )
        return None
    if any(map(reading.scatters, range(len(reading.results)))) and found != 0.0:
        raise UnreadableError(
            "adds to the gradients of tokens after its own, which no mask was proved to leave out"
        )
    return found


def _word(value: float | None) -> str:
    return "values that are not known" if value is None else f"{value:g}"


def _of_keys(reading: Reading, rests: Sequence[float | None]) -> float | None:
    pairs = zip(reading.operands, rests, strict=True)
    return next((rest for layout, rest in pairs if KEY in kinds(layout)), None)


def _zero_of_groups(eqn: JaxprEqn, rests: Sequence[float | None]) -> float | None:
    """Return 0 if the operands that a result is linear in are nothing, and no other is infinite,
    else None."""
    if any(rest is not None and math.isinf(rest) for rest in rests):
        return None
    for group in operator_of(eqn).linear_groups(eqn):
        if group and all(rests[k] == 0.0 for k in group if k < len(rests)):
            return 0.0
    return None


def _rest_of(eqn: JaxprEqn, reading: Reading, rests: Sequence[float | None]) -> float | None:
    if not any(KEY in kinds(layout) for layout in (*reading.operands, *reading.results)):
        return None
    if not is_elementwise(eqn) and _zero_of_groups(eqn, rests) == 0.0:
        return 0.0
    return rest_of_parts(eqn, rests)


def rest_of_parts(eqn: JaxprEqn, rests: Sequence[float | None]) -> float | None:
    """Return the rest of the result of an operator that makes parts of it of parts of its
    operands, given their rests; None if it is not one number."""
    if is_elementwise(eqn) or operator_of(eqn).passes_on:
        return _of_elements(eqn, rests)
    moves = operator_of(eqn).layout or operator_of(eqn).order_survives(eqn)
    return rests[0] if moves else None


def _of_elements(eqn: JaxprEqn, rests: Sequence[float | None]) -> float | None:
    """Return what an elementwise operator makes of these rests."""
    if is_selection(eqn):
        if rests[0] is not None:
            return rests[1 + int(rests[0])]
        return rests[1] if len(set(rests[1:])) == 1 else None
    known = [rest for rest in rests if rest is not None]
    if len(known) == len(rests):
        found = _of_numbers(eqn, known)
        if found is not None:
            found = as_rest(found, dtype_of(eqn.outvars[0]))
            return found if _holds_of_finite(eqn, known, found) else None
        return None
    return 0.0 if _zero_of_groups(eqn, rests) == 0.0 else of_some(eqn, rests)


def _of_numbers(eqn: JaxprEqn, numbers: Sequence[float]) -> float | None:
    dtypes = tuple(str(dtype_of(atom)) for atom in eqn.invars)
    found = _evaluated(_Call(eqn, (eqn.primitive.name, dtypes, str(eqn.params), tuple(numbers))))
    return None if found is None or math.isnan(found) else found


def _holds_of_finite(eqn: JaxprEqn, rests: Sequence[float], found: float) -> bool:
    """Return whether what an operator makes of infinite rests it also makes of the finite
    constants that they may stand for: 1/1e9 is not 0, nor log(1e9) or 1e-9 * 1e9 as good as
    infinite, nor is -1e9 the -inf that it may be compared with."""
    if not any(map(math.isinf, rests)):
        return True
    if is_comparison(eqn) and len({*rests}) < len(rests):
        return False
    finite = [math.copysign(_STANDS_FOR, one) if math.isinf(one) else one for one in rests]
    made = _of_numbers(eqn, finite)
    if made is None or not math.isinf(found):
        return made == found
    return math.copysign(made, found) == made and abs(made) >= _STANDS_FOR / 100


class _Call:
    """An elementwise operator and numbers for its operands, compared by its key."""

    def __init__(self, eqn: JaxprEqn, key: tuple[Any, ...]) -> None:
        self.eqn, self.key = eqn, key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key


@functools.lru_cache(maxsize=4096)
def _evaluated(call: _Call) -> float | None:
    """Return what an operator makes of scalars, None if it takes none."""
    eqn, rests = call.eqn, call.key[-1]
    try:
        with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
            values = [
                jnp.asarray(np.asarray(rest).astype(dtype_of(atom)))
                for rest, atom in zip(rests, eqn.invars, strict=True)
            ]
            (result,) = compat.bind(eqn, values)
            return float(result)
    except (TypeError, ValueError):
        return None
