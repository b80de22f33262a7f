"""What is in pieces is whole only where a pass reads it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import perceptron
import pytest

import alpa_meta as alpa
from alpa_meta.execution.compiled_task import compile_task

WEIGHTS = [jnp.full((32, 32), 0.05 + 0.01 * k) for k in range(3)]
BATCH = jnp.linspace(-1.0, 1.0, 1024 * 32).reshape(1024, 32)


def _step(preset, **options):
    return alpa.parallelize(
        perceptron.step, cluster="host:8", num_stages=1, mesh_shape=(8,), preset=preset, **options
    )


def _gathers(step, *args):
    """Return the numbers of gathers and of barriers of the programs for accelerators."""
    planned = step.lower(*args).planned
    tasks = [compile_task(planned, task, None) for task in planned.tasks.tasks]
    gathers = [one for task in tasks for one in task.planned if one.kind == "all-gather"]
    names = [eqn.primitive.name for task in tasks for eqn in task.closed.jaxpr.eqns]
    return len(gathers), names.count("optimization_barrier")


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_backward_pass_gathers_again_what_it_reads(num_microbatches):
    step = _step("zero3", num_microbatches=num_microbatches)
    # of three weights two are read again: the gradient of the first needs no input gradient
    assert _gathers(step, WEIGHTS, BATCH) == (5, 1)
    assert step.audit(WEIGHTS, BATCH).equal


def test_whole_parameters_are_read_as_they_are():
    assert _gathers(_step("dp", num_microbatches=1), WEIGHTS, BATCH) == (0, 0)


def test_an_activation_in_pieces_is_gathered_for_each_pass():
    rows, columns = ("x", None), (None, "x")

    def train(weight, batch):
        def loss(weight):
            hidden = alpa.pin(jnp.tanh(batch), rows)  # as sequence parallelism leaves it
            return jnp.mean(alpa.pin(hidden @ weight, columns) ** 2)

        value, gradient = jax.value_and_grad(loss)(weight)
        return weight - 0.1 * gradient, value

    options: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "mesh_shape": (8,)}
    pins = {"weight": columns, "batch": rows}
    step = alpa.parallelize(train, cluster="host:8", pins=pins, **options)
    weight = jnp.ones((32, 32))
    gathers, barriers = _gathers(step, weight, BATCH)
    assert gathers in (2, 3)  # for both products, and for the mean where links are fast
    assert barriers == 1
    assert step.audit(weight, BATCH).equal


def test_what_is_a_small_share_of_memory_is_gathered_once(monkeypatch):
    monkeypatch.setattr("alpa_meta.execution.barriers.WORTH", 1.0)
    assert _gathers(_step("zero3", num_microbatches=1), WEIGHTS, BATCH) == (3, 0)
