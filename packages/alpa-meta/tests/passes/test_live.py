import jax
import jax.numpy as jnp

from alpa_meta.passes.live import without_dead


def test_equations_that_no_output_needs_are_removed_and_effects_stay():
    def function(x):
        jax.debug.callback(lambda value: None, jnp.sin(x))
        return jnp.cos(x), jnp.tan(x)

    program = jax.make_jaxpr(function)(1.0)
    part = program.jaxpr.replace(outvars=program.jaxpr.outvars[:1])
    left = without_dead(jax.extend.core.ClosedJaxpr(part, program.consts))
    assert [eqn.primitive.name for eqn in left.jaxpr.eqns] == ["sin", "debug_callback", "cos"]
