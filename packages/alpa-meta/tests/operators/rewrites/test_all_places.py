"""Gathers of every place along a dim are the operand, its dims in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.operators.rewrites import ALL_PLACES, WHOLE_SLICES, with_rewrite
from alpa_meta.passes.live import without_dead
from alpa_meta.step.trace import trace

X = jax.random.normal(jax.random.key(0), (3, 4, 5))


def _each(function, count, out=0):
    return jax.vmap(function, out_axes=out)(jnp.arange(count))


ALL = {
    "an index": lambda x: _each(lambda k: x[k], 3),
    "a middle dim": lambda x: _each(lambda k: x[:, k], 4),
    "the last dim": lambda x: _each(lambda k: x[..., k], 5, 2),
    "a slice": lambda x: _each(lambda k: lax.dynamic_slice_in_dim(x, k, 1), 3),
    "a slice of a middle dim": lambda x: _each(
        lambda k: lax.dynamic_slice_in_dim(x, k, 1, axis=1), 4, 3
    ),
}
SOME = {
    "the first places": lambda x: _each(lambda k: x[k], 2),
    "places back to front": lambda x: _each(lambda k: x[2 - k], 3),
    "longer slices": lambda x: _each(lambda k: lax.dynamic_slice_in_dim(x, k, 2), 3),
    "a part of another dim": lambda x: _each(
        lambda k: lax.dynamic_slice(x, (k, 0, 0), (1, 2, 5)), 3
    ),
}


def _rewritten(function):
    program, _ = trace(function, X)
    for rewrite in (WHOLE_SLICES, ALL_PLACES):
        program = with_rewrite(program, rewrite)
    found = without_dead(program)
    (result,) = jax.extend.core.jaxpr_as_fun(found)(X)
    np.testing.assert_array_equal(result, function(X))
    return [eqn.primitive.name for eqn in found.jaxpr.eqns]


@pytest.mark.parametrize("function", ALL.values(), ids=ALL.keys())
def test_all_places_are_the_operand(function):
    assert "gather" not in _rewritten(function)


@pytest.mark.parametrize("function", SOME.values(), ids=SOME.keys())
def test_other_places_stay_gathered(function):
    assert "gather" in _rewritten(function)
