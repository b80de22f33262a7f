"""Bounds of what operators make of intervals hold for every element, and settle comparisons."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_meta.compat import Literal, open_jaxpr
from alpa_meta.operators.intervals import UNKNOWN, Interval, holds_exactly, results_of

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "ge": lambda x, y: x >= y,
    "gt": lambda x, y: x > y,
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "neg": lambda x, _: -x,
    "div": lambda x, _: jax.lax.div(x, 3),
    "rem": lambda x, _: jax.lax.rem(x, 3),
    "sign": lambda x, _: jnp.sign(x),
    "convert": lambda x, _: x.astype(bool),
}


def bounds(function, *operands):
    """Return the bounds of a function of one equation."""
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(jnp.int32(0), jnp.int32(0)))
    (eqn,) = jaxpr.eqns
    known = dict(zip(jaxpr.invars, operands, strict=True))
    return results_of(
        eqn,
        [
            Interval(float(a.val), float(a.val)) if isinstance(a, Literal) else known[a]
            for a in eqn.invars
        ],
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(derandomize=True, max_examples=25, deadline=None)
@given(ends=st.lists(st.integers(-9, 9), min_size=4, max_size=4))
def test_every_element_is_within_the_bounds(name, ends):
    (a, b), (c, d) = sorted(ends[:2]), sorted(ends[2:])
    found = bounds(FUNCTIONS[name], Interval(a, b), Interval(c, d))
    x, y = np.meshgrid(np.arange(a, b + 1), np.arange(c, d + 1))
    pairs = jnp.asarray(x.ravel(), jnp.int32), jnp.asarray(y.ravel(), jnp.int32)
    values = np.asarray(jax.vmap(FUNCTIONS[name])(*pairs))
    assert found.low <= values.min()
    assert values.max() <= found.high


def test_comparisons_of_positions_are_settled_for_every_position_at_once():
    row = key = Interval(0.0, 0.0, 1.0, 100)
    assert bounds(FUNCTIONS["ge"], row, key).constant == 1.0
    assert bounds(FUNCTIONS["lt"], row, key).constant == 0.0
    assert bounds(FUNCTIONS["ge"], row, Interval(0.0, 0.0)).constant == 1.0
    assert bounds(FUNCTIONS["ge"], row, Interval(1.0, 1.0)).constant is None


def test_positions_that_a_type_rounds_are_not_known():
    assert holds_exactly(np.dtype(jnp.bfloat16), 256)
    assert not holds_exactly(np.dtype(jnp.bfloat16), 257)
    assert not holds_exactly(np.dtype(np.int8), 128)
    assert holds_exactly(np.dtype(np.float32), math.inf)
    rounded = bounds(lambda x, _: x.astype(jnp.bfloat16), Interval(0, 300), Interval())
    assert rounded == UNKNOWN
