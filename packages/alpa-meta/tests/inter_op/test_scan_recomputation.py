"""Scans over layers whose backward scan computes the layers again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from alpa_meta.compat import scan_counts
from alpa_meta.inter_op.layering import assign_layers, tensor_bytes
from alpa_meta.inter_op.recomputation import recomputed
from alpa_meta.operators.regions import is_scan
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.step.program import Step

LENGTH, WIDTH, BATCH = 3, 4, 8
WEIGHTS = jax.random.normal(jax.random.key(0), (LENGTH, WIDTH, WIDTH))
EXAMPLES = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def block(x, weight):
    return jnp.tanh(jnp.sin(x @ weight) @ weight), None


def metered(x, weight):
    """Return what the backward pass reads as a result, too."""
    wave = jnp.sin(x @ weight)
    return jnp.tanh(wave * wave), wave


def step_of(body):
    def step(weights, batch):
        def loss(weights):
            x, seen = jax.lax.scan(body, batch, weights)
            return jnp.mean(x**2), seen

        (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return weights - gradient, value, seen

    return step


def layered(body, kind):
    program = Step(step_of(body), (WEIGHTS, EXAMPLES)).program(1)
    layering = assign_layers(program, lambda eqns, inputs: [0] * len(eqns))
    return program, layering, recomputed(layering, {0: kind}, program)


def scans(layering):
    """Return the forward and the backward scan."""
    return [eqn for eqn in layering.eqns if is_scan(eqn)]


def stacked_bytes(eqn):
    return sum(map(tensor_bytes, eqn.outvars[scan_counts(eqn)[1] :]))


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("body", [block, metered])
def test_the_results_are_those_of_the_step(body, kind):
    program, _, after = layered(body, kind)
    jaxpr = program.jaxpr
    again = jaxpr_of(jaxpr, jaxpr.constvars, jaxpr.invars, jaxpr.outvars, list(after.eqns))
    found = jaxpr_as_fun(program.closed.replace(jaxpr=again))(WEIGHTS, EXAMPLES)
    expected = jax.tree.leaves(step_of(body)(WEIGHTS, EXAMPLES))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_only_what_each_layer_was_given_is_stacked():
    _, before, after = layered(block, "full")
    assert stacked_bytes(scans(before)[0]) > 2 * LENGTH * BATCH * WIDTH * 4
    assert stacked_bytes(scans(after)[0]) == LENGTH * BATCH * WIDTH * 4
    assert len(scans(after)) == 2


def test_selective_recomputation_also_stacks_products():
    _, _, after = layered(block, "selective")
    assert stacked_bytes(scans(after)[0]) == 3 * LENGTH * BATCH * WIDTH * 4


def test_results_of_the_step_stay_stacked():
    program, _, after = layered(metered, "full")
    assert program.jaxpr.outvars[2] in scans(after)[0].outvars


def test_scans_that_the_user_recomputes_are_left_as_they_are():
    _, before, after = layered(jax.checkpoint(block), "full")
    assert scans(before) == scans(after)


def test_a_scan_over_time_is_cloned_whole():
    def step(weight, batch):
        def loss(weight):
            def body(x, example):
                return jnp.tanh(x @ weight + example), None

            x, _ = jax.lax.scan(body, jnp.zeros(WIDTH), jnp.sin(batch))
            return jnp.mean(x**2)

        return weight - jax.grad(loss)(weight)

    program = Step(step, (WEIGHTS[0], EXAMPLES), batch_argnums=(1,)).program(1)
    layering = assign_layers(program, lambda eqns, inputs: [0] * len(eqns))
    assert len(scans(layering)) == 2
    assert len(scans(recomputed(layering, {0: "full"}, program))) == 3
