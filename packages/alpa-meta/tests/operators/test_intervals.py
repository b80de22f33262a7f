"""Bounds of what operators make of intervals hold for every element, and settle comparisons."""

import math
from collections.abc import Callable
from functools import cache
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


MOST = 9


@cache
def values_of(name):
    """Return the function's values of all pairs of numbers up to `MOST`, [x, y]."""
    numbers = jnp.arange(-MOST, MOST + 1, dtype=jnp.int32)
    return np.broadcast_to(FUNCTIONS[name](numbers[:, None], numbers), 2 * numbers.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(derandomize=True, max_examples=25, deadline=None)
@given(ends=st.lists(st.integers(-MOST, MOST), min_size=4, max_size=4))
def test_every_element_is_within_the_bounds(name, ends):
    (a, b), (c, d) = sorted(ends[:2]), sorted(ends[2:])
    found = bounds(FUNCTIONS[name], Interval(a, b), Interval(c, d))
    values = values_of(name)[a + MOST : b + MOST + 1, c + MOST : d + MOST + 1]
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


LAST = 17
SIZES = (2, 3)


def of_places(draw):
    """Return an interval of places in blocks, with up to two sizes of blocks."""
    ends = sorted((draw(-3, 3), draw(-3, 3)))
    blocks = tuple((size, float(c)) for size in SIZES if (c := draw(-4, 4)))
    return Interval(float(ends[0]), float(ends[1]), float(draw(-3, 3)), LAST, blocks)


def at(one, p):
    """Return the least and the largest of an interval at a place."""
    there = one.slope * p + sum(c * (p // size) for size, c in one.blocks)
    return one.low + there, one.high + there


@pytest.mark.parametrize("name", ["add", "sub", "neg", "ge", "gt", "le", "lt", "eq", "ne"])
@settings(derandomize=True, max_examples=25, deadline=None)
@given(data=st.data())
def test_places_in_blocks_are_within_the_bounds_at_every_place(name, data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    one, two = of_places(draw), of_places(draw)
    found = bounds(FUNCTIONS[name], one, two)
    flat = found.flat()
    for p in range(LAST + 1):
        low, high = at(found, p)
        assert flat.low <= low and high <= flat.high
        for x in at(one, p):
            for y in at(two, p):
                value = float(FUNCTIONS[name](np.float64(x), np.float64(y)))
                assert low <= value <= high


def test_a_place_is_in_its_own_block():
    place = Interval(0.0, 0.0, 1.0, LAST)
    block = Interval(0.0, 0.0, 0.0, LAST, ((3, 3.0),))
    within = bounds(FUNCTIONS["sub"], place, block)
    assert within.flat() == Interval(0.0, 2.0, 0.0, LAST)
    assert bounds(FUNCTIONS["ge"], place, block).constant == 1.0
    assert bounds(FUNCTIONS["gt"], place, block).constant is None
    assert bounds(FUNCTIONS["eq"], bounds(FUNCTIONS["add"], block, within), place).constant == 1.0
