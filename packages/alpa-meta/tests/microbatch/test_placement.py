"""How one operator runs on what a microbatch holds, for every form of what it reads."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.compat import open_jaxpr
from alpa_meta.microbatch.placement import (
    REPLICATED,
    SUM,
    MixedError,
    Placement,
    operator_reading,
    replicated_as_split,
    split,
)
from alpa_meta.step.trace import trace

LARGEST, SMALLEST = (Placement("extreme", reduction=name) for name in ("max", "min"))


def equation(function, *shapes):
    """Return the last equation of a function of float arrays of these shapes."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return open_jaxpr(trace(function, *args)[0]).eqns[-1]


MATRIX = (8, 4)


@pytest.mark.parametrize(
    ("function", "operands", "result"),
    [
        (jnp.exp, [split(0)], split(0)),
        (lambda x: x.T, [split(0)], split(1)),
        (lambda x: x.sum(0), [split(0)], SUM),
        (lambda x: x.sum(1), [split(0)], split(0)),
        (lambda x: x.max(0), [split(0)], LARGEST),
        (lambda x: x.min(0), [split(0)], SMALLEST),
        (lambda x: x.reshape(32), [split(0)], split(0)),
        (lambda x: 2.0 * x, [REPLICATED, SUM], SUM),
        (lambda x: x.sum(0), [SUM], SUM),
        (lambda x: -x, [SUM], SUM),
        (lambda x: x.T, [LARGEST], LARGEST),
    ],
)
def test_results_of_one_operand(function, operands, result):
    eqn = equation(function, MATRIX)
    assert operator_reading(eqn, operands, 2).results == (result,)


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (jnp.exp, [SUM]),
        (lambda x: x.astype(jnp.int32), [SUM]),
        (lambda x: jnp.sort(x, 0), [split(0)]),
        (lambda x: jnp.cumsum(x, 0), [split(0)]),
        (lambda x: -x, [LARGEST]),
        (lambda x: x[::-1], [split(0)]),
    ],
)
def test_what_mixes_examples_is_refused(function, operands):
    with pytest.raises(MixedError):
        operator_reading(equation(function, MATRIX), operands, 2)


def test_a_whole_value_is_added_by_one_microbatch():
    eqn = equation(lambda x, y: x + y, (4,), (4,))
    reading = operator_reading(eqn, [SUM, REPLICATED], 2)
    assert reading.operands == (SUM, SUM)
    assert reading.results == (SUM,)


def test_the_part_of_a_whole_value_is_taken():
    eqn = equation(lambda x, y: x * y, MATRIX, MATRIX)
    reading = operator_reading(eqn, [split(0), REPLICATED], 2)
    assert reading.operands == (split(0), split(0))


def test_a_product_is_linear_in_one_sum_only():
    eqn = equation(lambda x, y: x * y, (4,), (4,))
    assert operator_reading(eqn, [SUM, REPLICATED], 2).results == (SUM,)
    with pytest.raises(MixedError):
        operator_reading(eqn, [SUM, SUM], 2)


def test_a_quotient_is_linear_in_its_numerator():
    eqn = equation(lambda x, y: x / y, (4,), (4,))
    assert operator_reading(eqn, [SUM, REPLICATED], 2).results == (SUM,)
    with pytest.raises(MixedError):
        operator_reading(eqn, [REPLICATED, SUM], 2)


def test_examples_against_examples_are_refused():
    eqn = equation(lambda x, y: x @ y.T, MATRIX, MATRIX)
    with pytest.raises(MixedError):
        operator_reading(eqn, [split(0), split(1)], 2)


def test_a_number_of_microbatches_that_does_not_divide_the_examples_is_refused():
    with pytest.raises(MixedError):
        operator_reading(equation(jnp.exp, MATRIX), [split(0)], 3)


def test_only_the_larger_of_a_largest_and_a_whole_value_is_one():
    eqn = equation(jnp.maximum, (4,), (4,))
    assert operator_reading(eqn, [LARGEST, REPLICATED], 2).results == (LARGEST,)
    with pytest.raises(MixedError):
        operator_reading(eqn, [SMALLEST, REPLICATED], 2)


def test_zeros_of_the_batch_are_made_as_parts():
    eqn = equation(lambda: jnp.zeros(MATRIX))
    made = replicated_as_split(eqn, 0, 0, 2)
    assert made is not None
    assert made.results == (split(0),)
    assert replicated_as_split(eqn, 0, 0, 3) is None


def test_the_batch_is_followed_behind_the_time():
    eqn = equation(lambda x: x.reshape(32, 3), (4, 8, 3))
    merged = operator_reading(eqn, [split(1)], 2).results
    assert merged == (split(0, 4),)
    eqn = equation(lambda x: x @ jnp.ones((3, 5)), (32, 3))
    assert operator_reading(eqn, [*merged, REPLICATED], 2).results == (split(0, 4),)
    eqn = equation(lambda x: x.reshape(4, 8, 5), (32, 5))
    assert operator_reading(eqn, [split(0, 4)], 2).results == (split(1),)
