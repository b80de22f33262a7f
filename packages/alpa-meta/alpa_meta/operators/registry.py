"""The table of all operators, and the questions asked of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from alpa_interchange import ShardingRule
from alpa_meta import compat
from alpa_meta.operators import (
    contraction,
    convolution,
    cutting,
    elementwise,
    indexing,
    layout,
    linalg,
    ordering,
    random,
    reduction,
    window,
)
from alpa_meta.operators.operator import (
    LocalFunction,
    Operator,
    RuleFunction,
    never_linear,
    run_unchanged,
    shape_of,
)

_OPERATORS: dict[str, Operator] = {
    **elementwise.OPERATORS,
    **contraction.OPERATORS,
    **convolution.OPERATORS,
    **layout.OPERATORS,
    **cutting.OPERATORS,
    **indexing.OPERATORS,
    **reduction.OPERATORS,
    **ordering.OPERATORS,
    **window.OPERATORS,
    **random.OPERATORS,
    **linalg.OPERATORS,
}
_HEAVY = (
    "dot_general",
    "ragged_dot_general",
    "conv_general_dilated",
    "gather",
    "scatter",
    "random_bits",
    "cumsum",
    "cumlogsumexp",
    "cummax",
    "cumprod",
)
_UNKNOWN = Operator(elementwise.unknown_rule)


def register(
    primitive_name: str,
    rule: RuleFunction,
    local: LocalFunction = run_unchanged,
    linear: Callable[[Any], bool] = never_linear,
) -> None:
    """Give the primitive called `primitive_name` a sharding rule, in place of any it has.

    `rule` maps an equation to its ShardingRule, with one entry per operand and result; `local` runs
    the operator on the parts of its operands (by default: the primitive itself, unchanged).
    """
    _OPERATORS[primitive_name] = Operator(rule, local, linear)
    _rule_of.cache_clear()
    sharding_rule.cache_clear()
    _number_of.cache_clear()


def known_primitives() -> frozenset[str]:
    """Return the names of the primitives in the table."""
    return frozenset(_OPERATORS)


def operator_of(eqn: Any) -> Operator:
    """Return the table entry of an equation's primitive."""
    return _OPERATORS.get(eqn.primitive.name, _UNKNOWN)


def is_heavy(eqn: Any) -> bool:
    """Return whether an equation chooses its own strategy instead of following an operand."""
    return bool(eqn.primitive.name.startswith(_HEAVY))


@lru_cache(maxsize=1 << 17)  # equations compare by identity
def sharding_rule(eqn: Any) -> ShardingRule | None:
    """Return the sharding rule of `eqn`, or None if it can only run replicated.

    The rule has an entry for every operand, literals included.
    """
    signature = operator_signature(eqn)
    return _rule_of(signature) if isinstance(signature, _Signature) else _computed(eqn)


def rule_number(eqn: Any) -> int:
    """Return a number that is equal for equations of one primitive, types and rule."""
    return _number_of(operator_signature(eqn))


@lru_cache(maxsize=1 << 17)
def operator_signature(eqn: Any) -> Hashable:
    """Return what is equal for equations of one primitive, types and parameters.

    The equation itself where its parameters cannot be compared.
    """
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    key = (
        eqn.primitive.name,
        tuple((shape_of(a), getattr(a.aval, "dtype", None)) for a in eqn.invars),
        tuple((shape_of(v), getattr(v.aval, "dtype", None)) for v in eqn.outvars),
        params,
    )
    try:
        return _Signature(eqn, key)
    except TypeError:
        return eqn  # type: ignore[no-any-return]


def linear_operands(eqn: Any) -> bool:
    """Return whether `eqn` is linear in its tensor operands together.

    If so, and if all of them are unreduced sums over the same axes, so is its result.
    """
    summed = [atom for atom in eqn.invars if not isinstance(atom, compat.Literal)]
    if not summed or not all(jnp.issubdtype(atom.aval.dtype, jnp.number) for atom in summed):
        return False
    return operator_of(eqn).linear(eqn)


def _computed(eqn: Any) -> ShardingRule | None:
    rule = operator_of(eqn).rule(eqn)
    if rule is None:
        return None
    ranks = [len(shape_of(atom)) for atom in (*eqn.invars, *eqn.outvars)]
    stated = [len(dims) for dims in (*rule.operands, *rule.results)]
    if ranks != stated:
        raise ValueError(
            f"the sharding rule of {eqn.primitive.name!r} must have one entry per dim of every "
            f"operand and result: ranks are {ranks}, the rule {rule} has {stated}"
        )
    return rule


class _Signature:
    """An equation compared by primitive, types and parameters, so that each rule is made once."""

    def __init__(self, eqn: Any, key: tuple[Any, ...]) -> None:
        self.eqn, self.key, self._hash = eqn, key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Signature) and self.key == other.key


@lru_cache(maxsize=1 << 14)
def _number_of(signature: Hashable) -> int:
    eqn: Any = getattr(signature, "eqn", signature)
    types = [tuple(str(atom.aval) for atom in atoms) for atoms in (eqn.invars, eqn.outvars)]
    return _NUMBERS.setdefault((eqn.primitive.name, *types, sharding_rule(eqn)), len(_NUMBERS))


_NUMBERS: dict[Hashable, int] = {}


@lru_cache(maxsize=4096)
def _rule_of(signature: _Signature) -> ShardingRule | None:
    return _computed(signature.eqn)
