"""What a scatter writes over is not shared with constants that are only read."""

from __future__ import annotations

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa
from alpa_meta.execution.compiled_task import compile_task

TABLES = {"users": jnp.full((64, 8), 0.5), "items": jnp.linspace(0.0, 1.0, 512).reshape(64, 8)}
BATCH = {"users": jnp.arange(16) * 3 % 64, "items": jnp.arange(16) * 5 % 64}
OPTIMISER = optax.adagrad(0.1)  # reads a zero of the shape of each table


def _lookups(tables, batch):
    rows = jax.tree.map(lambda table, index: jnp.take(table, index, axis=0), tables, batch)
    return jnp.mean(jnp.sum(rows["users"] * rows["items"], axis=1) ** 2)


def _train(state, batch):
    tables, moments = state
    loss, gradients = jax.value_and_grad(_lookups)(tables, batch)
    updates, moments = OPTIMISER.update(gradients, moments, tables)
    return (optax.apply_updates(tables, updates), moments), loss


def _step(preset):
    return alpa.parallelize(
        _train, cluster="host:8", num_stages=1, num_microbatches=1, mesh_shape=(8,), preset=preset
    )


@pytest.mark.parametrize("preset", ["dp", "zero3"])
def test_programs_for_accelerators_scatter_into_numbers_from_behind_a_barrier(preset):
    state = (TABLES, OPTIMISER.init(TABLES))
    planned = _step(preset).lower(state, BATCH).planned
    (task,) = planned.tasks.tasks
    eqns = compile_task(planned, task, None).closed.jaxpr.eqns
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    written = [made[eqn.invars[0]] for eqn in eqns if eqn.primitive.name.startswith("scatter")]
    assert len(written) == len(TABLES)
    for zeros in written:
        barrier = made[zeros.invars[0]]
        assert barrier.primitive.name == "optimization_barrier"
        assert barrier.invars[0].val == 0.0
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert len(barriers) == len(TABLES)


def test_the_barriers_change_no_result():
    state = (TABLES, OPTIMISER.init(TABLES))
    planned = _step("dp").lower(state, BATCH).planned
    (task,) = planned.tasks.tasks
    paths = [leaf.path for leaf in planned.program.inputs]
    given = dict(zip(paths, jax.tree.leaves((state, BATCH)), strict=True))
    program = jex.jaxpr_as_fun(compile_task(planned, task, None).closed)
    made = program(*(given[name] for name in task.spec.inputs))
    found = dict(zip(task.outvars, made, strict=True))
    expected = jax.tree.leaves(jax.jit(_train)(state, BATCH))
    for var, value in zip(planned.program.jaxpr.outvars, expected, strict=True):
        np.testing.assert_allclose(found[var], value, rtol=1e-6)
