"""The names of operators in plans."""

import jax
import jax.numpy as jnp

from alpa_meta.planning.operator_names import names_in_body, operator_names
from alpa_meta.step.trace import trace


def _eqns(function):
    closed, _ = trace(function, jax.ShapeDtypeStruct((4,), jnp.float32))
    return getattr(closed, "jaxpr", closed).eqns


def test_equal_operators_of_a_scope_are_numbered_in_order():
    def step(x):
        with jax.named_scope("inner"):
            x = jnp.sin(jnp.sin(x))
        return jnp.sin(x)

    assert operator_names(_eqns(step)) == ["inner/sin.0", "inner/sin.1", "sin.0"]


def test_another_operator_renames_its_equals_only():
    before = operator_names(_eqns(lambda x: jnp.cos(jnp.sin(x))))
    after = operator_names(_eqns(lambda x: jnp.cos(jnp.tanh(jnp.sin(x)))))
    assert set(before) < set(after)


def test_operators_in_a_body_have_the_region_in_front():
    (eqn,) = _eqns(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x))
    body = eqn.params["jaxpr"]
    names = names_in_body("scan.0", 0, getattr(body, "jaxpr", body).eqns)
    assert "scan.0>0>sin.0" in names
