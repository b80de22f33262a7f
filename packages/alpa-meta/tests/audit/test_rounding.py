"""What rounding otherwise does to steps of mixed precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.audit.numerics import sensitivity, single_device_reference
from alpa_meta.audit.rounding import ALL, NARROW, rounded_otherwise, rounds

X = jnp.linspace(1.0, 2.0, 256).reshape(16, 16)


def _narrow(x):
    return jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32)


def _in_scan(x):
    return lax.scan(lambda carry, row: (carry + _narrow(row).sum(), _narrow(row)), 0.0, x)


def _in_while(x):
    return lax.fori_loop(0, 3, lambda _, value: _narrow(value), x)


def _in_cond(x):
    return lax.cond(x[0, 0] > 0, _narrow, lambda value: value, x)


def _in_remat(x):
    return jax.grad(lambda value: jax.checkpoint(_narrow)(value).sum())(x)


@pytest.mark.parametrize("step", [_narrow, _in_scan, _in_while, _in_cond, _in_remat])
def test_narrow_results_move_by_their_own_rounding_error_wherever_they_are(step):
    moved = max(sensitivity(step, (X,), jax.random.key(0)).values())
    assert 2**12 < moved < 2**24  # an ulp of bfloat16 is 2**16 of float32
    same = rounded_otherwise(step, (X,), 0)(X)
    for changed, plain in zip(jax.tree.leaves(same), jax.tree.leaves(step(X)), strict=True):
        assert changed.shape == plain.shape and changed.dtype == plain.dtype
        np.testing.assert_allclose(changed, plain, rtol=0.1, atol=0.1)


def test_a_step_of_float32_is_left_as_it_is():
    def step(x):
        return jnp.sin(x)

    program = jax.make_jaxpr(step)(X)
    assert not rounds(program, NARROW) and rounds(program, ALL)
    assert rounded_otherwise(step, (X,), 0) is step


def test_another_rounding_in_bfloat16_agrees_and_a_missing_term_differs():
    def step(x):
        narrow = x.astype(jnp.bfloat16)
        return {"sum": (narrow * narrow).sum(axis=0).astype(jnp.float32)}

    halves = [step(part)["sum"] for part in jnp.split(X, 2)]
    apart = {"sum": (halves[0] + halves[1]).astype(jnp.bfloat16).astype(jnp.float32)}
    assert single_device_reference(step, (X,), jax.random.key(1)).check(apart).ok
    assert not single_device_reference(step, (X,), jax.random.key(1)).check({"sum": halves[0]}).ok
