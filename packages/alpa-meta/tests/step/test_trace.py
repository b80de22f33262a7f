"""One flat jaxpr: calls inlined, loops kept, dead work gone, the same results."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

from alpa_meta.compat import consts, name_stack, open_jaxpr, subjaxprs
from alpa_meta.step.trace import inline, trace


def names(closed):
    return [eqn.primitive.name for eqn in open_jaxpr(closed).eqns]


def run(closed, *values):
    return jax.core.eval_jaxpr(open_jaxpr(closed), consts(closed), *values)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def nested(x):
    return jax.jit(lambda y: jax.nn.relu(jax.jit(jnp.sin)(y)) + doubled(y))(x).sum()


def test_calls_are_replaced_by_their_bodies():
    closed, shape = trace(jax.value_and_grad(nested), jax.ShapeDtypeStruct((3,), jnp.float32))
    assert not {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"} & set(names(closed))
    assert shape[1].shape == (3,)
    x = jnp.array([0.5, -1.0, 2.0])
    expected = jax.value_and_grad(nested)(x)
    for got, want in zip(run(closed, x), expected, strict=True):
        assert np.allclose(got, want)


@custom_vmap
def tripled(x):
    return 3 * x


tripled.def_vmap(lambda size, batched, x: (3 * x, batched[0]))


def composed(x):
    return jax.lax.composite(lambda x, *, by: x * by, "test.scaled")(x, by=2.0) + tripled(x)


def test_calls_that_only_name_or_batch_their_body_are_replaced_by_it():
    x = jnp.arange(3.0)
    closed, _ = trace(composed, x)
    assert {"composite", "custom_vmap_call"}.isdisjoint(names(closed))
    np.testing.assert_allclose(run(closed, x)[0], 5 * x)


@pytest.mark.parametrize(
    "solve",
    [
        lambda a, b: jnp.linalg.solve(a, b),
        lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=20)[0],
    ],
)
def test_linear_solves_are_replaced_by_their_solvers_forward_and_transposed(solve):
    a = jnp.array([[3.0, 1.0], [1.0, 2.0]])
    b = jnp.array([1.0, -1.0])
    function = jax.value_and_grad(lambda a, b: (solve(a, b) ** 2).sum(), argnums=(0, 1))
    closed, _ = trace(function, a, b)
    assert "custom_linear_solve" not in names(closed)
    for got, want in zip(run(closed, a, b), jax.tree.leaves(function(a, b)), strict=True):
        assert np.allclose(got, want, rtol=1e-5)


def test_inlined_equations_still_show_that_they_were_transposed():
    closed, _ = trace(jax.grad(nested), jax.ShapeDtypeStruct((3,), jnp.float32))
    assert any("transpose" in name_stack(eqn) for eqn in open_jaxpr(closed).eqns)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (lambda x: jax.lax.scan(lambda c, _: (jax.jit(jnp.sin)(c), None), x, None, 3)[0], "scan"),
        (
            lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jax.jit(jnp.exp)(c), x),
            "while",
        ),
        (lambda x: jax.lax.cond(x.sum() > 0, jax.jit(jnp.sin), jnp.cos, x), "cond"),
    ],
)
def test_regions_stay_with_their_bodies_inlined(function, primitive):
    closed, _ = trace(function, jax.ShapeDtypeStruct((3,), jnp.float32))
    (region,) = [eqn for eqn in open_jaxpr(closed).eqns if eqn.primitive.name == primitive]
    inner = [eqn.primitive.name for _, body in subjaxprs(region) for eqn in open_jaxpr(body).eqns]
    assert not {"jit", "pjit"} & set(inner)
    x = jnp.array([0.5, 0.1, 0.2])
    assert np.allclose(run(closed, x)[0], function(x))


def test_work_that_nobody_needs_is_removed():
    closed, _ = trace(
        lambda x: (jnp.sin(x), jnp.cos(x))[0], jax.ShapeDtypeStruct((3,), jnp.float32)
    )
    assert names(closed) == ["sin"]


def test_arrays_closed_over_become_constants():
    table = np.arange(6.0).reshape(2, 3)
    closed, _ = trace(jax.jit(lambda x: jnp.asarray(table) @ x), jax.ShapeDtypeStruct((3,), float))
    assert np.allclose(run(closed, jnp.ones(3))[0], table.sum(1))


def test_inlining_twice_changes_nothing():
    closed, _ = trace(nested, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert names(inline(closed)) == names(closed)


def test_primitives_that_stand_for_their_implementation_are_replaced_by_it():
    held = jex.Primitive("nonbatchable")
    held.def_impl(lambda x, *, msg: x * 2)
    held.def_abstract_eval(lambda x, *, msg: x)
    found, _ = trace(lambda x: held.bind(jnp.sin(x), msg="no"), jnp.ones(4))
    assert names(found) == ["sin", "mul"]
    np.testing.assert_allclose(run(found, jnp.ones(4))[0], 2 * np.sin(np.ones(4)), rtol=1e-6)
