"""Programs are shared where they differ in names only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.execution.shared_programs import program_key

X = np.linspace(0.0, 1.0, 6, dtype=np.float32).reshape(2, 3)


def key(function):
    return program_key(jax.make_jaxpr(function)(X, X))


def test_programs_that_differ_in_names_only_have_equal_keys():
    def other(left, right):
        start, rows = right[0], jnp.tanh(left) * 2.0
        return lax.scan(lambda carry, row: (carry + row, carry), start, rows)

    assert key(lambda x, y: lax.scan(lambda a, b: (a + b, a), y[0], jnp.tanh(x) * 2.0)) == key(
        other
    )


CHANGED = {
    "another number": lambda x, y: jnp.tanh(x) * 3.0 + y,
    "the other operand": lambda x, y: jnp.tanh(y) * 2.0 + x,
    "another operator": lambda x, y: jnp.sin(x) * 2.0 + y,
    "another constant": lambda x, y: jnp.tanh(x) * (2.0 + X) + y,
    "another body": lambda x, y: lax.map(lambda z: jnp.tanh(z) * 2.0, x) + y,
    "results in another order": lambda x, y: (y, jnp.tanh(x) * 2.0 + y),
}


@pytest.mark.parametrize("change", CHANGED)
def test_programs_that_differ_in_anything_else_have_other_keys(change):
    assert key(CHANGED[change]) != key(lambda x, y: jnp.tanh(x) * 2.0 + y)


def test_constants_and_places_are_told_apart():
    assert key(lambda x, y: x + X) != key(lambda x, y: x + 2 * X)
    assert key(lambda x, y: lax.slice(x, (0, 0), (1, 3))) != key(
        lambda x, y: lax.slice(x, (1, 0), (2, 3))
    )
