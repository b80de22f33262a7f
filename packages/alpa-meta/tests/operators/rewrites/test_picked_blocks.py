"""Loops that pick blocks by a number are given them, and compute what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.step.trace import inline

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 3)))
BLOCK = 4


def summed(x, start=0.0):
    def trip(number, state):
        block = lax.dynamic_slice_in_dim(x, number * BLOCK, BLOCK, 1)
        return jnp.tanh(state + block.sum(1) * (number + 1))

    return lax.fori_loop(0, 3, trip, jnp.full((2, 3), start))


def indexed(x):
    blocks = jnp.moveaxis(x.reshape(2, 3, BLOCK, 3), 1, 0)

    def trip(state, number):
        made = jnp.sin(state) * blocks[number]
        return made, (made.sum(), number * 2)

    return lax.scan(trip, jnp.ones((2, BLOCK, 3)), jnp.arange(3))[1]


def twice(x):
    other = jnp.exp(x)

    def trip(state, number):
        one = lax.dynamic_slice_in_dim(x, number * BLOCK, BLOCK, 1)
        two = lax.dynamic_slice_in_dim(other, number * BLOCK, BLOCK, 1)
        return state + (one * two).sum(), one.sum() * two.sum()

    return lax.scan(jax.checkpoint(trip), 0.0, jnp.arange(3))


PICKED = {
    "by a count": summed,
    "by a number": indexed,
    "twice, recomputed": twice,
    "in a recomputation": jax.checkpoint(summed),
    "in layers": lambda x: lax.scan(lambda s, _: (s + summed(x, 0.1), None), x[:, 0], length=2)[0],
}


def names(jaxpr):
    """Return the operators of a program and of its bodies."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += names(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("function", PICKED.values(), ids=PICKED)
def test_blocks_and_their_gradients_are_handed_to_the_loop(function):
    def loss(x):
        return sum(jnp.sum(jnp.asarray(one, float) ** 2) for one in jax.tree.leaves(function(x)))

    for one in (function, jax.grad(loss)):
        closed = inline(jax.make_jaxpr(one)(X))
        assert not {"dynamic_slice", "dynamic_update_slice"} & {*names(closed.jaxpr)}
        found = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
        for two, expected in zip(found, jax.tree.leaves(one(X)), strict=True):
            np.testing.assert_allclose(two, expected, rtol=1e-6, atol=1e-7)


def reverse_numbers(x):
    return lax.scan(
        lambda s, n: (s * 0.5 + lax.dynamic_slice_in_dim(x, n * BLOCK, BLOCK, 1), None),
        jnp.zeros((2, BLOCK, 3)),
        jnp.arange(3)[::-1],
    )[0]


def overlapping(x):
    return lax.fori_loop(
        0, 3, lambda n, s: s * 0.5 + lax.dynamic_slice_in_dim(x, n * 2, BLOCK, 1), x[:, :BLOCK]
    )


def of_a_part(x):
    return lax.fori_loop(
        0, 2, lambda n, s: s * 0.5 + lax.dynamic_slice_in_dim(x, n * BLOCK, BLOCK, 1), x[:, :BLOCK]
    )


def wrapping(x):
    """Count 0, 64 and then, as eight bits hold no more, -128, which picks the first block."""
    wide = jnp.tile(x, (1, 16, 1))

    def trip(state, _):
        start, held = state
        block = lax.dynamic_slice(wide, (jnp.int8(0), start, jnp.int8(0)), (2, 64, 3))
        return (start + jnp.int8(64), held * 0.5 + block), None

    return lax.scan(trip, (jnp.int8(0), jnp.zeros((2, 64, 3))), length=3)[0][1]


@pytest.mark.parametrize("function", [reverse_numbers, overlapping, of_a_part, wrapping])
def test_other_blocks_are_picked_as_they_were(function):
    closed = inline(jax.make_jaxpr(function)(X))
    assert "dynamic_slice" in names(closed.jaxpr)
    (found,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
    np.testing.assert_allclose(found, function(X), rtol=1e-6)
