"""Values that leave the microbatches: which, their totals, and the value of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from two_matrices import BATCH, SHAPE, STATE, step

from alpa_meta.compat import ClosedJaxpr, Var
from alpa_meta.errors import PlanError
from alpa_meta.execution.accumulation import accumulation_of, crossing_values
from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.step.program import Step


def accumulated(function, num_microbatches, state=STATE, batch=BATCH):
    """Return the program of one stage and how its values leave the microbatches."""
    program = Step(function, (state, batch), batch_argnums=(1,)).program(num_microbatches)
    layering = assign_layers(program, lambda eqns, inputs: [0] * len(eqns))
    staging = assign_stages(layering, [], program.jaxpr.outvars)
    return program, accumulation_of(program, crossing_values(staging, program))


def run(program, eqns, inputs, outputs, values):
    """Return `outputs` of equations for `values` of their inputs."""
    jaxpr = jaxpr_of(program.jaxpr, [], inputs, outputs, eqns)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*values)


def metrics(state, batch):
    updated, _ = step(state, batch)
    heights = jnp.abs(batch @ state["first"]).sum(-1)
    found = {"mean": heights.mean(), "sum": heights.sum(), "worst": heights.max()}
    return updated, {**found, "least": heights.min(), "each": heights}


def test_parts_of_every_form_become_the_value_of_the_whole_batch():
    program, found = accumulated(metrics, 4)
    parts = jnp.arange(1.0, 5.0)
    expected = {"sum": 10.0, "worst": 4.0, "least": 1.0}  # the mean is divided in the update
    for atom, path in zip(program.jaxpr.outvars, program.outputs, strict=True):
        name = path.split("'")[1]
        if name == "each":
            assert found.joined[atom] == 0
        if name not in expected:
            continue
        accumulator = found.accumulators[atom]
        following, start = Var(accumulator.aval), Var(accumulator.aval)
        (total,) = run(program, found.first(atom, start), [], [start], [])
        for part in parts:
            eqns = found.added(atom, following)
            (total,) = run(program, eqns, [accumulator, atom], [following], [total, part])
        (value,) = run(program, found.scaled(atom), [accumulator], [atom], [total])
        np.testing.assert_allclose(value, expected[name], err_msg=name)


def test_one_microbatch_needs_no_accumulators():
    _, found = accumulated(metrics, 1)
    assert not found.accumulators
    assert not found.joined


def test_half_precision_gradients_are_summed_in_float32():
    def low(state, batch):
        def loss(state):
            return jnp.mean(batch.astype(jnp.bfloat16) @ state["first"]).astype(jnp.float32)

        gradients = jax.grad(loss)(state)
        return jax.tree.map(lambda w, g: w - g, state, gradients)

    state = {name: SHAPE((4, 4), jnp.bfloat16) for name in STATE}
    _, found = accumulated(low, 2, state)
    assert {str(total.aval.dtype) for total in found.accumulators.values()} == {"float32"}


def test_an_update_that_reads_examples_has_their_parts_added_up():
    def late(state, batch):
        updated, metrics = step(state, batch)
        return updated, {"scaled": metrics["errors"] * updated["first"].sum()}

    program, found = accumulated(late, 2)
    assert not program.inexact
    assert (8,) in {total.aval.shape for total in found.accumulators.values()}
    assert not found.joined


def test_an_update_that_reads_keys_of_the_examples_is_refused():
    def late(state, batch):
        updated, _ = step(state, batch["x"])
        number = jnp.sum(jnp.tanh(updated["first"]) > 0)
        keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, 1), number))(
            batch["keys"]
        )
        return updated, jax.vmap(jax.random.normal)(keys)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    batch = {"x": BATCH, "keys": keys}
    with pytest.raises(PlanError, match="one entry per example"):
        accumulated(late, 2, batch=batch)
