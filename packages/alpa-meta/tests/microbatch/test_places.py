"""What selects examples by their place, and what does not add up, one question at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_meta.compat import open_jaxpr
from alpa_meta.microbatch.places import (
    adds_to_operand,
    same_constant,
    selects_examples,
)
from alpa_meta.operators import operator_of, sharding_rule

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
    assert selects_examples(operator_of(eqn), rule, rows)
    assert not selects_examples(operator_of(eqn), rule, places)


def test_a_row_written_by_one_update_is_selected_and_whole_columns_are_not():
    eqn = equation(
        lambda x, u: lax.dynamic_update_slice_p.bind(x, u, 0, 0),
        X,
        jax.ShapeDtypeStruct((1, 3), jnp.float32),
    )
    rule = sharding_rule(eqn)
    (rows,), (columns,) = rule.operands[0]
    assert selects_examples(operator_of(eqn), rule, rows)
    assert not selects_examples(operator_of(eqn), rule, columns)


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
        return operator_of(eqn), rule, rule.operands[2][0][0]

    assert adds_to_operand(*scattered(lax.scatter_add))
    assert not adds_to_operand(*scattered(lax.scatter_max))


def test_constants_are_the_same_by_value():
    assert same_constant(np.array([1.0, np.nan]), jnp.array([1.0, jnp.nan]))
    assert not same_constant(np.zeros(2), np.zeros(4))
    assert not same_constant(np.zeros(2), np.ones(2))
    assert same_constant(jax.random.key(0), jax.random.key(0))
    assert not same_constant(jax.random.key(0), jax.random.key(1))
