"""What a plan says of its operators."""

import jax
import jax.numpy as jnp
import numpy as np

from alpa_meta.options import Options
from alpa_meta.planning.planner import make_plan
from alpa_meta.step.program import Step
from cost_model import cluster

SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def planned(loss):
    def step(weight, batch):
        value, gradient = jax.value_and_grad(loss)(weight, batch)
        return weight - gradient, value

    options = Options(num_stages=1, num_microbatches=1)
    return make_plan(Step(step, (SHAPE, SHAPE)), cluster("h100:2"), options).plan


def through_python(x):
    x = jax.lax.stop_gradient(x)
    return jax.pure_callback(np.sort, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_operators_without_a_rule_are_named_also_inside_loops():
    def loss(weight, batch):
        def body(carry, _):
            return jnp.tanh(carry @ weight) + through_python(carry), None

        return jnp.mean(jax.lax.scan(body, batch, None, length=2)[0])

    assert planned(loss).shardings[0].replicated_ops == ("pure_callback",)


def test_recomputation_is_no_operator_without_a_rule():
    def loss(weight, batch):
        return jnp.mean(jax.checkpoint(lambda x: jnp.tanh(x @ weight))(batch))

    assert planned(loss).shardings[0].replicated_ops == ()
