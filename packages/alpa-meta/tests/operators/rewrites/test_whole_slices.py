"""Dims read or written whole are not indexed; results stay."""

from __future__ import annotations

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.step.trace import trace

X = jnp.arange(8 * 20.0).reshape(8, 20)
STARTS = jnp.array([0, 3, 7, 30, -2])  # the last two are clipped


def _windows(x, starts):
    return jax.vmap(lambda start: lax.dynamic_slice(x, (0, start), (8, 6)))(starts)


def _windows_of_middle(x, starts):
    cube = x.reshape(4, 2, 20)
    return jax.vmap(lambda start: lax.dynamic_slice(cube, (1, start, start), (4, 1, 5)))(starts)


def _written(x, starts):
    block = jnp.ones((8, 3))
    return jax.vmap(lambda start: lax.dynamic_update_slice(x, start * block, (0, start)))(starts)


def _summed(x, starts):
    return jax.grad(lambda x: (_windows(x, starts) ** 2).sum())(x)


def _whole(x, starts):
    return jax.vmap(lambda start: lax.dynamic_slice(x, (start, 0), (8, 20)))(starts)


@pytest.mark.parametrize(
    ("function", "indexed"),
    [(_windows, 1), (_windows_of_middle, 2), (_written, 1), (_summed, 1), (_whole, 1)],
)
def test_only_what_is_cut_is_indexed(function, indexed):
    program, _ = trace(function, X, STARTS)
    cutting = [e for e in program.jaxpr.eqns if e.primitive.name.startswith(("gather", "scatter"))]
    assert cutting
    assert {eqn.invars[1].aval.shape[-1] for eqn in cutting} == {indexed}
    (found,) = jax.jit(jax.extend.core.jaxpr_as_fun(program))(X, STARTS)
    np.testing.assert_array_equal(found, function(X, STARTS))


def test_places_out_of_range_are_still_dropped():
    def read(x, starts):
        places = jnp.stack([jnp.zeros_like(starts), starts], 1)
        numbers = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
        mode = lax.GatherScatterMode.FILL_OR_DROP
        return lax.gather(x, places, numbers, (8, 6), mode=mode, fill_value=-1.0)

    program, _ = trace(read, X, STARTS)
    (found,) = jax.jit(jax.extend.core.jaxpr_as_fun(program))(X, STARTS)
    np.testing.assert_array_equal(found, read(X, STARTS))
    assert (found[3:] == -1).all()
