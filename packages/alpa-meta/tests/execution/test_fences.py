"""Programs for accelerators recompute a layer when the one behind it is done."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import perceptron
import pytest
from jax.extend.core import jaxpr_as_fun

import alpa_meta as alpa
from alpa_meta.audit.planner_plans import audit_planned
from alpa_meta.execution.compiled_task import compile_task

WEIGHTS = [jnp.full((8, 8), 0.1 + 0.1 * k) for k in range(4)]
BATCH = jnp.linspace(-1.0, 1.0, 2**18 * 8).reshape(2**18, 8)


def checkpointed(weights, batch):
    @jax.checkpoint
    def block(hidden, weight):
        return jnp.tanh(hidden @ weight)

    def loss(weights):
        hidden = batch
        for weight in weights:
            hidden = block(hidden, weight)
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


@cache
def _task(step, **options):
    """Return the training task of `step`, as it is for accelerators, and the program it is of."""
    fixed = {"num_stages": 1, "num_microbatches": 1, "mesh_shape": (8,), "preset": "dp"}
    lowered = alpa.parallelize(step, cluster="host:8", **{**fixed, **options}).lower(WEIGHTS, BATCH)
    (task,) = (t for t in lowered.planned.tasks.tasks if t.spec.name == "train.0")
    return task, compile_task(lowered.planned, task, None), lowered.planned.program


STEPS = [(perceptron.step, {"recompute": "full", "num_layers": 4}), (checkpointed, {})]


@pytest.mark.parametrize(("step", "options"), STEPS)
def test_recomputation_waits_for_the_weight_gradients_behind_it(step, options):
    _, compiled, _ = _task(step, **options)
    eqns = compiled.closed.jaxpr.eqns
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    waited = [
        [atom for atom in barrier.invars if atom.aval.shape == (8, 8) and atom in made]
        for barrier in barriers
    ]
    gradients = [atom for one in waited for atom in one]
    assert len(gradients) == len(WEIGHTS) - 1  # nothing recomputes behind the first layer's
    assert all(made[atom].primitive.name in ("dot_general", "remat2") for atom in gradients)
    read = {atom for eqn in eqns for atom in eqn.invars if not hasattr(atom, "val")}
    for barrier in barriers:  # XLA drops what nothing reads
        assert all(var in read for var in barrier.outvars if var.aval.shape == (8, 8))


@pytest.mark.parametrize(("step", "options"), STEPS)
def test_gradients_are_summed_over_devices_behind_the_barrier(step, options):
    _, compiled, _ = _task(step, **options)
    barriers = [
        strategy
        for eqn, strategy in zip(compiled.closed.jaxpr.eqns, compiled.plan.strategies, strict=True)
        if eqn.primitive.name == "optimization_barrier"
    ]
    waited = [spec for strategy in barriers for spec in strategy.operands if spec.partial]
    assert len(waited) >= len(WEIGHTS) - 1
    sums = [one for one in compiled.planned if one.bytes == WEIGHTS[0].nbytes]
    assert len(sums) == len(WEIGHTS)


@pytest.mark.parametrize(("step", "options"), STEPS)
def test_the_program_is_that_of_the_task(step, options):
    task, compiled, program = _task(step, **options)
    inputs = [
        jax.random.normal(jax.random.key(k), var.aval.shape) for k, var in enumerate(task.invars)
    ]
    expected = jaxpr_as_fun(task.closed(program))(*inputs)
    for one, other in zip(jaxpr_as_fun(compiled.closed)(*inputs), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_recomputes_nothing_has_no_barrier():
    _, compiled, _ = _task(perceptron.step, recompute="none")
    names = [eqn.primitive.name for eqn in compiled.closed.jaxpr.eqns]
    assert "optimization_barrier" not in names


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="needs the extra audit-gpu")
@pytest.mark.parametrize(("step", "options"), STEPS)
def test_the_memory_of_the_gpu_program_falls_as_planned(step, options):
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6
    batch = jax.ShapeDtypeStruct((2**15, 512), jnp.float32)
    model = SimpleNamespace(name="perceptron", train_step=step, state=weights, batch=batch)
    fixed = {"num_stages": 1, "num_microbatches": 1, "cache": False, "preset": "dp"}
    if "num_layers" in options:
        options = {**options, "num_layers": 6}
    audit = audit_planned(model, "h100:2", alpa.Options(**{**fixed, **options}))
    assert audit.ok
    memory = audit.memory["train.0"]
    assert memory.predicted_peak_bytes is not None
    assert memory.peak_bytes < 1.1 * memory.predicted_peak_bytes
