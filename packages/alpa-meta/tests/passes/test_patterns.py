"""A rewrite replaces the patterns that end at its primitives."""

import jax
import jax.numpy as jnp
from jax import lax

from alpa_meta.operators.rewrites import Origins, Rewrite, with_rewrite
from alpa_meta.operators.rewrites.replacement import replacement

X = jnp.linspace(0.0, 1.0, 4)


def _logarithm_of_exponential(eqn, origins: Origins):
    inner = origins.eqn(eqn.invars[0])
    if inner is None or inner.primitive is not lax.exp_p:
        return None
    return replacement(lambda x: x + 0.0, inner.invars, eqn.outvars, eqn)


REWRITE = Rewrite(frozenset({"log"}), _logarithm_of_exponential)


def test_a_pattern_is_replaced_where_it_ends():
    program = jax.make_jaxpr(lambda x: (jnp.log(jnp.exp(x)), jnp.log(x)))(X)
    found = with_rewrite(program, REWRITE)
    assert [eqn.primitive.name for eqn in found.jaxpr.eqns] == ["exp", "add", "log"]
    same, logarithm = jax.extend.core.jaxpr_as_fun(found)(X)
    assert (same == X).all()
    assert (logarithm == jnp.log(X)).all()


def test_a_program_without_the_primitive_is_kept():
    program = jax.make_jaxpr(jnp.exp)(X)
    assert with_rewrite(program, REWRITE) is program
