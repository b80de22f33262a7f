"""What keeps a value from being a sum over examples, or a value per example: operators that select
examples by their place in the batch, or add to what is there.

`x[0]` of a batch is one example, of every microbatch another one; `table.at[i].add(1)` starts from
the table in every microbatch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_interchange import ShardingRule
from alpa_meta.operators import Operator


def selects_examples(operator: Operator, rule: ShardingRule, factor: str) -> bool:
    """Return whether an operator reads or writes at places along the batch, its `factor`.

    A read of one element at a time is a reduction over what devices hold, but no sum over examples;
    what is written along the batch must bring a value for each example.
    """
    if operator.written is not None:
        return all(factor not in dim for dim in rule.operands[operator.written])
    return operator.indices is not None and rule.factor(factor).kind == "reduction"


def adds_to_operand(operator: Operator, rule: ShardingRule, factor: str) -> bool:
    """Return whether sums over the batch, its `factor`, are added to the first operand."""
    kind = rule.factor(factor)
    return operator.written is not None and (kind.kind, kind.reduction) == ("reduction", "add")


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
