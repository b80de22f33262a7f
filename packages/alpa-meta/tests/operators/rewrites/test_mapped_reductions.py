"""Reductions over an axis of vmap are reductions."""

from __future__ import annotations

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.compat import source_line
from alpa_meta.step.trace import trace

X = jnp.linspace(-1.0, 2.0, 24).reshape(4, 6)


def _normalised(x):
    mean = lax.pmean(x, "batch")
    spread = lax.pmax(x, "batch") - lax.pmin(x, "batch")
    return (x - mean) / spread, lax.psum(jnp.float32(1.0), "batch")


def _nested(x):
    def row(x):
        return jax.vmap(lambda y: y / lax.psum(y**2, ("rows", "columns")), axis_name="columns")(x)

    return jax.vmap(row, axis_name="rows")(x)


@pytest.mark.parametrize(
    "function",
    [
        jax.vmap(_normalised, axis_name="batch", out_axes=(0, None)),
        jax.vmap(_normalised, axis_name="batch", in_axes=1, out_axes=(1, None)),
        _nested,
        lambda x: jax.grad(lambda x: _nested(x).std())(x),
        lambda x: lax.scan(lambda c, row: (c + _nested(x).sum(), row), 0.0, x),
    ],
)
def test_no_collective_of_one_device_is_left(function):
    program, _ = trace(function, X)
    text = str(program)
    assert "psum" not in text and "pmax" not in text and "pmin" not in text
    expected = jax.tree.leaves(function(X))
    results = jax.jit(jax.extend.core.jaxpr_as_fun(program))(X)
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_the_line_of_the_user_s_program_is_kept():
    program, _ = trace(jax.vmap(_normalised, axis_name="batch", out_axes=(0, None)), X)
    sums = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name.startswith("reduce_")]
    assert sums and all(__file__ in source_line(eqn) for eqn in sums)
