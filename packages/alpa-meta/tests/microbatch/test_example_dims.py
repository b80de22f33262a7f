"""Which values hold examples, found from one trace."""

import jax
import jax.numpy as jnp

from alpa_meta.microbatch.example_dims import example_dims
from alpa_meta.microbatch.placement import split
from alpa_meta.step.program import Step
from alpa_meta.step.trace import trace

SHAPE = jax.ShapeDtypeStruct


def dims_of(function, *shapes):
    jaxpr, _ = trace(function, *shapes)
    known = example_dims(jaxpr, [None, split(0)])
    return [getattr(known.get(atom), "dim", None) for atom in jaxpr.jaxpr.outvars]


def test_the_batch_dim_is_followed_until_it_is_summed():
    def step(weights, batch):
        hidden = jnp.tanh(batch @ weights)
        return hidden, hidden.T, hidden.sum(0), batch.T @ hidden, weights * 2

    shapes = SHAPE((4, 4), jnp.float32), SHAPE((8, 4), jnp.float32)
    assert dims_of(step, *shapes) == [0, 1, None, None, None]


def test_a_loop_carries_examples_and_stacks_them():
    def step(weights, batch):
        def body(x, weight):
            return jnp.tanh(x * weight), x

        return jax.lax.scan(body, batch, weights)

    shapes = SHAPE((3,), jnp.float32), SHAPE((8, 4), jnp.float32)
    assert dims_of(step, *shapes) == [0, 1]


def test_a_step_that_is_not_cut_is_traced_once():
    calls = []

    def step(weights, batch):
        calls.append(batch.shape)
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        return weights - gradient, loss

    shapes = SHAPE((4, 4), jnp.float32), SHAPE((8, 4), jnp.float32)
    program = Step(step, shapes).program(1)
    assert calls == [(8, 4)]
    assert set(program.phases.of_eqn) == {"forward", "backward", "update"}
