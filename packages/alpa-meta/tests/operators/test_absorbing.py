"""A known operand that decides a result decides it whatever the other one is."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_meta.operators.absorbing import of_some

INF = math.inf
CASES = [
    (lax.add, (-INF, None)), (lax.add, (None, INF)),
    (lax.sub, (-INF, None)), (lax.sub, (None, INF)), (lax.min, (None, -INF)),
    (lax.eq, (-INF, None)), (lax.ne, (None, -INF)),
    (jnp.logical_and, (0.0, None)), (jnp.logical_or, (None, 1.0)),
]  # fmt: skip
OPEN = [
    (lax.add, (1.0, None)), (lax.min, (INF, None)), (lax.eq, (0.0, None)), (lax.mul, (0.5, None)),
    (jnp.logical_and, (1.0, None)), (lax.bitwise_and, (0, None)),
]  # fmt: skip


def _equation(function, known):
    logical = function in (jnp.logical_and, jnp.logical_or)
    dtype = jnp.bool_ if logical else jnp.int32 if function is lax.bitwise_and else jnp.float32
    shapes = [jax.ShapeDtypeStruct((), dtype)] * len(known)
    return jax.make_jaxpr(function)(*shapes).jaxpr.eqns[-1], dtype


@pytest.mark.parametrize(("function", "known"), CASES)
def test_a_result_is_what_the_operator_gives_for_any_finite_number(function, known):
    eqn, dtype = _equation(function, known)
    found = of_some(eqn, known)
    assert found is not None
    for other in (-3.0, 0.0, 5.0):
        operands = [jnp.asarray(other if one is None else one, dtype) for one in known]
        assert float(function(*operands)) == found


@pytest.mark.parametrize(("function", "known"), OPEN)
def test_a_result_that_depends_on_the_other_operand_is_not_known(function, known):
    assert of_some(_equation(function, known)[0], known) is None
