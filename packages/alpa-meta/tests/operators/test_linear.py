"""Multiples of unknown values hold for every value that they may have."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_meta.compat import open_jaxpr
from alpa_meta.operators.linear import Linear, Unknown, of_linear, product_of

LOW = -1e9
FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "neg": lambda x, _: -x,
    "mul": jax.lax.mul,
    "div": jax.lax.div,
    "max": jax.lax.max,
    "ge": lambda x, y: x >= y,
    "gt": lambda x, y: x > y,
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "is_finite": lambda x, _: jnp.isfinite(x),
    "narrower": lambda x, _: x.astype(jnp.float32),
}
UNKNOWNS = [Unknown(number, "float64", live=number == 0) for number in range(3)]


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def made(function, *operands, types=(jnp.float64, jnp.float64)):
    """Return what is said of a function of one equation."""
    (eqn,) = open_jaxpr(jax.make_jaxpr(function)(*(jnp.zeros(2, one) for one in types))).eqns
    return of_linear(eqn, operands[: len(eqn.invars)], LOW)


def drawn(data):
    """Return a number, a mask's too, or multiples of unknown values."""
    number = st.sampled_from([-math.inf, -1e30, -2.0, 0.0, 0.5, 1.0])
    terms = st.dictionaries(st.sampled_from(UNKNOWNS), st.sampled_from([-1.0, 0.5, 1.0]))
    if data.draw(st.booleans()):
        return Linear(data.draw(number))
    found = Linear(data.draw(st.sampled_from([0.0, 0.0, 1.5])))
    for unknown, times in data.draw(terms).items():
        found = found.plus(Linear(0.0, ((unknown, 1.0),)), times)
    return found


def value_of(one, held):
    return one.constant + sum(times * held[unknown] for unknown, times in one.terms)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_what_is_said_of_a_result_is_what_it_is(name, data):
    for _ in range(8):
        operands = [drawn(data), drawn(data)]
        said = made(FUNCTIONS[name], *operands)
        if said is None:
            continue
        for seed in range(3):
            values = np.random.default_rng(seed).integers(-8, 9, 3)  # exact in every type
            held = dict(zip(UNKNOWNS, values.astype(float), strict=True))
            got = FUNCTIONS[name](*(jnp.float64(value_of(one, held)) for one in operands))
            np.testing.assert_allclose(float(got), value_of(said, held), rtol=1e-12)


def unknown(number, dtype="float64", **known):
    return Linear(0.0, ((Unknown(number, dtype, **known), 1.0),))


POWERS: dict[str, Callable[..., jax.Array]] = {
    "mul": jax.lax.mul,
    "div": jax.lax.div,
    "square": lambda x, *_: jax.lax.integer_pow(x, 2),
    "inverse": lambda x, *_: jax.lax.integer_pow(x, -1),
}


@pytest.mark.parametrize("name", POWERS)
@given(data=st.data())
def test_a_product_of_powers_is_the_product(name, data):
    operands = [drawn(data), drawn(data)]
    (eqn,) = open_jaxpr(jax.make_jaxpr(POWERS[name])(*(jnp.zeros(2),) * 2)).eqns
    operands = operands[: len(eqn.invars)]
    said = product_of(eqn, operands)
    for seed in range(3):
        values = np.random.default_rng(seed).integers(1, 9, 3) / 8.0
        held = dict(zip(UNKNOWNS, values, strict=True))
        if said is not None:
            got = POWERS[name](*(jnp.float64(value_of(one, held)) for one in operands))
            expected = sum(
                times * np.prod([held[one] ** power for one, power in powers])
                for powers, times in said.items()
            )
            np.testing.assert_allclose(float(got), expected, rtol=1e-9, atol=1e-9)


def test_a_value_divided_by_itself_is_one():
    (eqn,) = open_jaxpr(jax.make_jaxpr(jax.lax.div)(1.0, 1.0)).eqns
    assert product_of(eqn, [unknown(0), unknown(0)]) == {(): 1.0}
    assert product_of(eqn, [unknown(0), unknown(0).plus(Linear(1e-3))]) is None


def test_a_masked_score_changes_no_running_maximum_that_is_live():
    live, any_one = unknown(0, live=True), unknown(1)
    masked = Linear(-1e30)
    assert made(jax.lax.max, live, masked) == live
    assert made(jax.lax.max, any_one, masked) is None
    assert made(jax.lax.max, any_one, Linear(-math.inf)) == any_one
    assert made(jax.lax.max, live, Linear(-1.0)) is None


def test_a_mask_is_added_to_nothing_unknown():
    assert made(jnp.add, unknown(0), Linear(-1e30)) is None
    assert made(jnp.subtract, unknown(0), unknown(0)) == Linear()


def test_a_narrower_type_holds_only_what_it_held_before():
    def narrow(x, _):
        return x.astype(jnp.bfloat16)

    types = (jnp.float32, jnp.float32)
    assert made(narrow, unknown(0, "float32"), types=types) is None
    assert made(narrow, unknown(0, "bfloat16"), types=types) == unknown(0, "bfloat16")


def test_dims_that_move_are_another_value():
    def said(function):
        (eqn,) = open_jaxpr(jax.make_jaxpr(function)(jnp.zeros((2, 3, 1)))).eqns
        return of_linear(eqn, [unknown(0)], LOW)

    assert said(lambda x: jnp.transpose(x, (1, 0, 2))) is None
    assert said(lambda x: jnp.transpose(x, (2, 0, 1))) == unknown(0)
    assert said(lambda x: x.sum(2)) == unknown(0)
    assert said(lambda x: x.max(1)) is None
    assert said(lambda x: jax.lax.squeeze(x, (2,))) == unknown(0)
