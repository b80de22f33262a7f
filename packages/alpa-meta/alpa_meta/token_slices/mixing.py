"""Products of the tokens with a matrix of weights over them, as in spatial gating, Toeplitz kernels
and long convolutions written as a product.

    out[t] = sum over s of M[t, s] x[s]      M known before the step, and 0 for s after t

Forward, t is the row and s the key: a slice has its rows of M and the prefix of x. Backward, the
gradient of x[s] is a sum over the rows t of which each slice has its own, and adds to the keys. M
must be proved to be 0 behind the rows of each slice (`mask_facts`), which holds in one of the two
orders at most where its diagonal blocks are all it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn
from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.token_slices.mask_facts import MaskFacts
from alpa_meta.token_slices.places import KEY, ROW, Place, Slices
from alpa_meta.token_slices.reading import Reading, UnreadableError, reading_at
from alpa_meta.token_slices.values import BEFORE, Value


def mixing_of(
    eqn: JaxprEqn, operands: Sequence[Value], masks: MaskFacts, slices: Slices
) -> tuple[Reading | None, str]:
    """Return how a slice multiplies tokens by a matrix over them that is known to be 0 for later
    ones; None for what is no such product, or is not proved to be (the reason)."""
    why = ""
    for matrix, reading in _readings(eqn, operands, slices):
        rest = masks.operand_rest(eqn.invars[matrix], operands[matrix], reading.operands[matrix])
        if rest == 0.0:
            return reading, ""
        why = (
            "multiplies the tokens by a matrix that was not proved to leave out those after each "
            "(it must be 0 there, as `jnp.tril` makes it)"
        )
    return None, why


def _readings(
    eqn: JaxprEqn, operands: Sequence[Value], slices: Slices
) -> Iterator[tuple[int, Reading]]:
    """Yield the number of the matrix, and both orders of its dims."""
    rule, groups = sharding_rule(eqn), operator_of(eqn).linear_groups(eqn)
    if rule is None or len(operands) != 2 or not {(0,), (1,)} <= {*map(tuple, groups)}:
        return
    for matrix, tokens in ((0, 1), (1, 0)):
        known, held = operands[matrix], operands[tokens]
        if known.in_parts or known.when != BEFORE or held.state != "sliced":
            continue
        summed = _summed(rule, tokens, held)
        if summed is None or summed not in _alone(rule, matrix):
            continue
        of_tokens = {name for dim in rule.operands[tokens] for name in dim}
        for other in _alone(rule, matrix):
            factor = rule.factor(other)
            if other in of_tokens or factor.kind != "parallel" or factor.size != slices.tokens:
                continue
            for row, key in ((other, summed), (summed, other)):
                try:
                    yield matrix, reading_at(rule, {row: Place(ROW), key: Place(KEY)}, slices)
                except UnreadableError:
                    continue


def _summed(rule: ShardingRule, operand: int, value: Value) -> str | None:
    """Return the factor of the tokens of an operand, if it is one that the product sums over."""
    places = [(d, place) for d, place in enumerate(value.layout) if place is not None]
    if len(places) != 1 or places[0][1] != Place(ROW):
        return None
    dim = rule.operands[operand][places[0][0]]
    factor = rule.factor(dim[0]) if len(dim) == 1 else None
    summed = factor is not None and (factor.kind, factor.reduction) == ("reduction", "add")
    return dim[0] if summed else None


def _alone(rule: ShardingRule, operand: int) -> list[str]:
    """Return the factors that are dims of their own in an operand."""
    return [dim[0] for dim in rule.operands[operand] if len(dim) == 1]
