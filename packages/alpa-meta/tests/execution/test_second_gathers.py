"""Parameters in pieces are whole only where a pass reads them."""

from __future__ import annotations

import jax.numpy as jnp
import perceptron
import pytest

import alpa_meta as alpa

WEIGHTS = [jnp.full((32, 32), 0.05 + 0.01 * k) for k in range(3)]
BATCH = jnp.linspace(-1.0, 1.0, 1024 * 32).reshape(1024, 32)


def _step(preset, **options):
    return alpa.parallelize(
        perceptron.step, cluster="host:8", num_stages=1, mesh_shape=(8,), preset=preset, **options
    )


def _gathers(step):
    tasks = step.lower(WEIGHTS, BATCH).compile().tasks.values()
    planned = [one for task in tasks for one in task.planned if one.kind == "all-gather"]
    barriers = sum(
        eqn.primitive.name == "optimization_barrier"
        for task in tasks
        for eqn in task.closed.jaxpr.eqns
    )
    return len(planned), barriers


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_backward_pass_gathers_again_what_it_reads(num_microbatches):
    step = _step("zero3", num_microbatches=num_microbatches)
    # of three weights two are read again: the gradient of the first needs no input gradient
    assert _gathers(step) == (5, 1)
    assert step.audit(WEIGHTS, BATCH).ok


def test_whole_parameters_are_read_as_they_are():
    assert _gathers(_step("dp", num_microbatches=1)) == (0, 0)
