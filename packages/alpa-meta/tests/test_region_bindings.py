"""What flows into and out of regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_meta.compat import open_jaxpr, shape_of
from alpa_meta.region_bindings import bindings, trips
from alpa_meta.step.trace import inline


def region(function, *args):
    eqns = open_jaxpr(inline(jax.make_jaxpr(function)(*args))).eqns
    (found,) = [eqn for eqn in eqns if bindings(eqn) is not None]
    return found


X, STACK = jnp.ones((4, 8)), jnp.ones((3, 8, 8))


def scan(x, stack):
    return lax.scan(lambda carry, w: (jnp.tanh(carry @ w), carry.sum(0)), x, stack)


@pytest.mark.parametrize(
    ("function", "args", "num_trips"),
    [
        (scan, (X, STACK), 3),
        (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * x, x), (X,), 1),
        (lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), (True, X), 1),
        (lambda x: jax.grad(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum()))(x), (X,), 1),
    ],
)
def test_dims_of_inner_values_are_those_outside_but_for_stacked_ones(function, args, num_trips):
    eqn = region(function, *args)
    found = bindings(eqn)
    assert trips(eqn) == num_trips
    assert found is not None and found.values
    for outer, inner, shift in found.values:
        assert shape_of(outer)[shift:] == shape_of(inner)


def test_a_scan_binds_its_carry_at_both_ends_and_stacks_behind_the_first_dim():
    eqn = region(scan, X, STACK)
    found = bindings(eqn)
    assert found is not None
    shifts = [shift for _, _, shift in found.values]
    assert sorted(shifts) == [0, 0, 0, 1, 1]  # carry in, out and again; weights and sums


def test_an_operator_binds_nothing():
    (eqn,) = open_jaxpr(jax.make_jaxpr(jnp.tanh)(X)).eqns
    assert bindings(eqn) is None
