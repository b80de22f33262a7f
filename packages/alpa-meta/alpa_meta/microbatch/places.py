"""What keeps a value from being a sum over examples, or a value per example: operators that select
examples by their place in the batch, and conversions that do not add up.

`x[0]` of a batch is one example, of every microbatch another one; `table.at[i].add(1)` starts from
the table in every microbatch; the integer part of a sum is not the sum of the integer parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_interchange import ShardingRule

_READS = ("gather", "dynamic_slice")
_WRITTEN = {"dynamic_update_slice": 1} | {
    f"scatter{name}": 2 for name in ("", "-add", "-sub", "-mul", "-min", "-max", "_add")
}
"""The operand that is written, by the name of the operator."""


def selects_examples(name: str, rule: ShardingRule, factor: str) -> bool:
    """Return whether an operator reads or writes at places along the batch, its `factor`.

    A read of one element at a time is a reduction over what devices hold, but no sum over examples;
    what is written along the batch must bring a value for each example.
    """
    if name in _READS:
        return rule.factor(factor).kind == "reduction"
    written = _WRITTEN.get(name)
    return written is not None and all(factor not in dim for dim in rule.operands[written])


def adds_to_operand(name: str, rule: ShardingRule, factor: str) -> bool:
    """Return whether sums over the batch, its `factor`, are added to the first operand."""
    kind = rule.factor(factor)
    return name in _WRITTEN and (kind.kind, kind.reduction) == ("reduction", "add")


def sums_survive(eqn: Any) -> bool:
    """Return whether sums of parts are converted or divided to parts of the sum."""
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if eqn.primitive.name == "convert_element_type":
        floored = jnp.issubdtype(source, jnp.inexact) and jnp.issubdtype(target, jnp.integer)
        return target != np.bool_ and not floored
    return eqn.primitive.name != "div" or bool(jnp.issubdtype(target, jnp.inexact))


def order_survives(eqn: Any) -> bool:
    """Return whether the largest stays the largest, and the smallest the smallest, if converted."""
    if eqn.primitive.name != "convert_element_type":
        return True
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if np.bool_ in (source, target):
        return bool(source == np.bool_)
    signs_lost = jnp.issubdtype(target, jnp.unsignedinteger)
    return not signs_lost or bool(jnp.issubdtype(source, jnp.unsignedinteger))


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two values a program closes over are equal."""
    if one is other:
        return True
    if np.shape(one) != np.shape(other):
        return False
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one, other = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
