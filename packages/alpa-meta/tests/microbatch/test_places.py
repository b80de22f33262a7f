"""What selects examples by their place, and what does not add up, one question at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.compat import open_jaxpr
from alpa_meta.microbatch.places import (
    adds_to_operand,
    order_survives,
    same_constant,
    selects_examples,
    sums_survive,
)
from alpa_meta.operators import sharding_rule

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)
PLACES = jax.ShapeDtypeStruct((4, 1), jnp.int32)
UPDATES = lax.ScatterDimensionNumbers((), (0,), (0,))
ROW = lax.GatherDimensionNumbers((1,), (0,), (0,))


def equation(function, *shapes):
    (eqn,) = open_jaxpr(jax.make_jaxpr(function)(*shapes)).eqns
    return eqn


def test_reading_single_rows_selects_along_the_rows_and_not_along_the_places():
    eqn = equation(
        lambda x, i: lax.gather_p.bind(
            x,
            i,
            dimension_numbers=ROW,
            slice_sizes=(1, 3),
            mode=lax.GatherScatterMode.CLIP,
            indices_are_sorted=False,
            unique_indices=False,
            fill_value=None,
        ),
        X,
        PLACES,
    )
    rule = sharding_rule(eqn)
    ((rows,), _), ((places,), _) = rule.operands
    assert selects_examples("gather", rule, rows)
    assert not selects_examples("gather", rule, places)


def test_a_row_written_by_one_update_is_selected_and_whole_columns_are_not():
    eqn = equation(
        lambda x, u: lax.dynamic_update_slice_p.bind(x, u, 0, 0),
        X,
        jax.ShapeDtypeStruct((1, 3), jnp.float32),
    )
    rule = sharding_rule(eqn)
    (rows,), (columns,) = rule.operands[0]
    assert selects_examples("dynamic_update_slice", rule, rows)
    assert not selects_examples("dynamic_update_slice", rule, columns)


def test_only_updates_that_are_added_add_to_the_operand():
    def scattered(function):
        table = jax.ShapeDtypeStruct((8,), jnp.float32)
        eqn = equation(
            lambda t, i, u: function(t, i, u, UPDATES),
            table,
            PLACES,
            jax.ShapeDtypeStruct((4,), jnp.float32),
        )
        rule = sharding_rule(eqn)
        return eqn.primitive.name, rule, rule.operands[2][0][0]

    assert adds_to_operand(*scattered(lax.scatter_add))
    assert not adds_to_operand(*scattered(lax.scatter_max))


@pytest.mark.parametrize(
    ("source", "target", "sums", "order"),
    [
        ("float32", "bfloat16", True, True),
        ("int32", "float32", True, True),
        ("float32", "int32", False, True),
        ("float32", "uint32", False, False),
        ("int32", "bool", False, False),
        ("bool", "int32", True, True),
        ("uint8", "uint32", True, True),
    ],
)
def test_conversions_keep_sums_and_order_or_not(source, target, sums, order):
    convert = lambda x: lax.convert_element_type(x, target)  # noqa: E731
    eqn = equation(convert, jax.ShapeDtypeStruct((), source))
    assert (sums_survive(eqn), order_survives(eqn)) == (sums, order)


def test_quotients_of_integers_do_not_add_up():
    assert not sums_survive(equation(lambda x: lax.div(x, 2), jax.ShapeDtypeStruct((), "int32")))
    assert sums_survive(equation(lambda x: lax.div(x, 2.0), jax.ShapeDtypeStruct((), "float32")))


def test_constants_are_the_same_by_value():
    assert same_constant(np.array([1.0, np.nan]), jnp.array([1.0, jnp.nan]))
    assert not same_constant(np.zeros(2), np.zeros(4))
    assert not same_constant(np.zeros(2), np.ones(2))
    assert same_constant(jax.random.key(0), jax.random.key(0))
    assert not same_constant(jax.random.key(0), jax.random.key(1))
