"""Gradients of each part of a batch that are added up are made as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.operators.rewrites import SUMMED_PRODUCTS, with_rewrite
from alpa_meta.passes.live import without_dead
from alpa_meta.step.trace import trace

X = jax.random.normal(jax.random.key(0), (3, 4, 5))
W = jax.random.normal(jax.random.key(1), (5, 6))
Y = jax.random.normal(jax.random.key(2), (2, 3, 4, 6))


def of_a_weight(x, y):
    gradients = jax.vmap(jax.grad(lambda w, x, y: jnp.sum((x @ w - y) ** 2)), (None, 0, 0))
    return gradients(W, x, y[0]).sum(0)


def turned(x, y):
    return jnp.einsum("nbi,nbo->noi", x, y[0]).sum(0)


def over_one_batch_dim(x, y):
    return jnp.einsum("mnbi,mnbo->mnio", jnp.stack([x, x]), y).sum(1)


def read_twice(x, y):
    each = jnp.einsum("nbi,nbo->nio", x, y[0])
    return each.sum(0), jnp.abs(each).max()


def over_a_free_dim(x, y):
    return jnp.einsum("nbi,nbo->nio", x, y[0]).sum(1)


def _batch_dims(program):
    products = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "dot_general")
    return sorted(len(eqn.params["dimension_numbers"][1][0]) for eqn in products)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (of_a_weight, [0, 0]),
        (turned, [0]),
        (over_one_batch_dim, [1]),
        (read_twice, [1]),
        (over_a_free_dim, [1]),
    ],
)
def test_batch_dims_that_are_summed_over_are_contracted(function, left):
    program, _ = trace(function, X, Y)
    found = without_dead(with_rewrite(program, SUMMED_PRODUCTS))
    assert _batch_dims(found) == left
    expected = jax.tree.leaves(function(X, Y))
    for a, b in zip(jax.extend.core.jaxpr_as_fun(found)(X, Y), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
