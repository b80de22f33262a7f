"""The proof that the tokens after a slice do not matter to it.

A slice reads the keys up to its end. What the whole program reads behind them must be nothing: a
value that is the same there for every row of the slice, its *rest*, is followed from the mask on.

    where(mask, scores, -inf)   a mask that is false there leaves the rest -inf
    exp(-inf - max)             0, which a sum over keys and a product with values may leave out
    max over keys               leaves out -inf
    0 * x, False and x          0, whatever x is

A mask constant that is only very low (-1e30) is as good as -inf: that is what a softmax makes of
it, unless a row has nothing but masked keys, which it would then share evenly with the keys left
out. So some key of each row must be known to be live, such as the row itself under a causal mask.
Until then the rest is the constant, scaled and added to like the scores: 1e-8 of -1e9 masks
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta import compat
from alpa_meta.compat import JaxprEqn, dtype_of
from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.operators.absorbing import of_some
from alpa_meta.operators.elementwise import is_comparison, is_elementwise, is_selection
from alpa_meta.program_caches import cached_by_program
from alpa_meta.token_slices.places import KEY, kinds
from alpa_meta.token_slices.reading import Reading, UnreadableError
from alpa_meta.types import DType

# exp of what is this far below the largest score is 0 in every type, and scores are far above it;
# the least number of float16 (-65504) is below it, also where it was widened
_MASKED = 6e4

UNITS = {"add": 0.0, "max": -math.inf, "min": math.inf, "or": 0.0, "and": 1.0}
"""What a reduction of each kind may leave out."""


def masked(dtype: DType) -> float:
    """Return the magnitude from which a number of a mask is as good as infinite: in float16 what
    1/sqrt(head dim) leaves of the largest."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return _MASKED
    return min(_MASKED, float(jnp.finfo(dtype).max) / 16)  # type: ignore[no-untyped-call]


def is_masked(rest: float | None, dtype: DType) -> bool:
    """Return whether a rest is infinite, or as good as that."""
    return rest is not None and abs(rest) >= masked(dtype)


def is_soft(rest: float | None, dtype: DType) -> bool:
    """Return whether a rest is infinite only as far as a finite mask constant is."""
    return rest is not None and is_masked(rest, dtype) and not math.isinf(rest)


def _limit(rest: float, dtype: DType) -> float:
    """Return a rest, infinite if it is as good as that."""
    return math.copysign(math.inf, rest) if is_masked(rest, dtype) else rest


def _limits(eqn: JaxprEqn, rests: Sequence[float | None]) -> list[float | None]:
    pairs = zip(eqn.invars, rests, strict=True)
    return [None if rest is None else _limit(rest, dtype_of(atom)) for atom, rest in pairs]


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
        found = None if held is None else _limit(held, dtype_of(eqn.invars[0]))
        if needed is None or found != needed:
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
    if any(is_masked(rest, dtype_of(atom)) for atom, rest in zip(eqn.invars, rests)):
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


def number_of(eqn: JaxprEqn, rests: Sequence[float | None]) -> float | None:
    """Return the number that the result of an operator is, if its operands are these numbers (None:
    anything finite); None if it is not one number."""
    if is_elementwise(eqn):
        return _of_elements(eqn, rests)
    if _zero_of_groups(eqn, rests) == 0.0:
        return 0.0
    if len(rests) != 1:
        return None
    rule = sharding_rule(eqn)
    reduced = {one.reduction for one in rule.factors if one.kind == "reduction"} if rule else set()
    kept = operator_of(eqn).layout or reduced and reduced <= {"max", "min", "or", "and"}
    return rests[0] if kept else None


def _of_elements(eqn: JaxprEqn, rests: Sequence[float | None]) -> float | None:
    """Return what an elementwise operator makes of these rests."""
    if is_selection(eqn):
        if rests[0] is not None:
            return rests[1 + int(rests[0])]
        return of_any(rests[1:], dtype_of(eqn.outvars[0]))
    known = [rest for rest in rests if rest is not None]
    if len(known) == len(rests):
        return _of_all(eqn, known)
    if _zero_of_groups(eqn, rests) == 0.0:
        return 0.0
    limits = _limits(eqn, rests)
    found = of_some(eqn, limits)
    if found is None or not math.isinf(found):
        return found
    pairs = zip(rests, limits, strict=True)
    least = min(abs(rest or 0.0) for rest, limit in pairs if math.isinf(limit or 0.0))
    return math.copysign(least, found)


def of_any(rests: Sequence[float | None], dtype: DType) -> float | None:
    """Return what a selection by an unknown condition leaves: of masked rests the less extreme."""
    known = [rest for rest in rests if rest is not None]
    if len(known) < len(rests) or len({*known}) == 1:
        return rests[0] if len({*rests}) == 1 else None
    same = len({_limit(rest, dtype) for rest in known}) == 1
    return min(known, key=abs) if same else None


def _of_all(eqn: JaxprEqn, rests: Sequence[float]) -> float | None:
    """Return what an operator makes of rests that are all known: of a masked one, which is a number
    at least about as large, only what it makes of infinity too (exp), or a number as good as
    infinite (a scaled mask constant, not its logarithm)."""
    limits = [limit for limit in _limits(eqn, rests) if limit is not None]
    if is_comparison(eqn) and math.isinf(limits[0]) and limits[0] == limits[1]:
        return None
    found, limit = _of_numbers(eqn, rests), _of_numbers(eqn, limits)
    if found is None or limit is None:
        return None
    if found != limit and _limit(found, dtype_of(eqn.outvars[0])) != limit:
        return None
    return found


def _of_numbers(eqn: JaxprEqn, numbers: Sequence[float]) -> float | None:
    dtypes = tuple(str(dtype_of(atom)) for atom in eqn.invars)
    found = _evaluated(_Call(eqn, (eqn.primitive.name, dtypes, str(eqn.params), tuple(numbers))))
    return None if found is None or math.isnan(found) else found


_Key = tuple[str, tuple[str, ...], str, tuple[float, ...]]


class _Call:
    """An elementwise operator and numbers for its operands, compared by its key."""

    def __init__(self, eqn: JaxprEqn, key: _Key) -> None:
        self.eqn, self.key = eqn, key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key


@cached_by_program(4096)
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
