import jax
import jax.numpy as jnp

from alpa_meta.compat import open_jaxpr
from alpa_meta.intra_op.equation_facts import facts_of


def _equation(function, *args):
    (eqn,) = open_jaxpr(jax.make_jaxpr(function)(*args)).eqns
    return eqn


def test_numbers_are_not_read_and_zero_is_noted():
    x = jnp.ones((4, 2))
    eqn = _equation(lambda x: jax.lax.max_p.bind(x, 0.0), x)
    facts = facts_of(eqn)
    assert facts.zero and not facts.region
    assert facts.reads == (eqn.invars[0],) and facts.read_at == (0,)
    assert facts.results == (((4, 2), 32.0),)


def test_a_loop_is_a_region():
    eqn = _equation(lambda x: jax.lax.scan(lambda c, _: (c, None), x, None, 3)[0], jnp.ones(2))
    assert facts_of(eqn).region
