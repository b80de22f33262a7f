"""The backward pass is split by what other stages wait for."""

import jax
import jax.numpy as jnp
import pytest
from perceptron import step

from alpa_meta.compat import shape_of
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.split_backward import (
    by_weight,
    by_weight_at_most,
    kept_for_weights,
    with_split_backward,
)
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.step.program import Step

WEIGHT, BATCH = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)


def by_products(eqns, inputs):
    layers, layer = [], -1
    for eqn in eqns:
        layer += eqn.primitive.name == "dot_general"
        layers.append(max(layer, 0))
    return layers


@pytest.fixture
def split():
    """Return four layers in two stages for four microbatches, with the backward in two parts."""
    program = Step(step, ([WEIGHT] * 4, BATCH)).program(4)
    staging = assign_stages(assign_layers(program, by_products), [2], program.jaxpr.outvars)
    return program, with_split_backward(staging)


def test_products_for_weights_are_delayed_and_products_for_inputs_are_not(split):
    _, staging = split
    products = {
        (stage, k in staging.by_weight)
        for k, (eqn, phase, stage) in enumerate(
            zip(staging.eqns, staging.phases, staging.stages, strict=True)
        )
        if phase == "backward" and eqn.primitive.name == "dot_general"
    }
    # Nothing waits for the backward of the first stage, so all of it is by weight.
    assert products == {(0, True), (1, True), (1, False)}
    delayed = [staging.eqns[k] for k in staging.by_weight if staging.stages[k] == 1]
    assert sum(eqn.primitive.name == "dot_general" for eqn in delayed) == 2


def test_the_part_by_input_keeps_the_cotangents_that_the_weights_need(split):
    _, staging = split
    kept = kept_for_weights(staging.eqns, staging.phases, staging.by_weight)
    assert [shape_of(var) for var in kept] == [(2, 4)] * 3  # one of them sent to stage 0


def test_values_sent_elsewhere_are_by_input():
    program = Step(step, ([WEIGHT] * 2, BATCH)).program(1)
    eqns, phases = program.jaxpr.eqns, program.phases.of_eqn
    whole = by_weight(eqns, phases, [0] * len(eqns))
    assert whole == {k for k, phase in enumerate(phases) if phase == "backward"}
    last = max(whole)
    assert last not in by_weight(eqns, phases, [0] * len(eqns), sent=eqns[last].outvars)


def test_no_stage_behind_the_first_layer_delays_more_than_its_layers_at_most():
    def descend(weights, batch):
        def loss(weights):
            x = batch @ weights[0] @ weights[1]
            prepared = jnp.tanh(weights[2] * weights[2])  # in layer 1, read in layer 2
            return jnp.mean((x @ prepared @ weights[3]) ** 2)

        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients)

    program = Step(descend, ([WEIGHT] * 4, BATCH)).program(1)
    layering = assign_layers(program, by_products)
    whole = assign_stages(layering, [], program.jaxpr.outvars)
    at_most = by_weight_at_most(whole.eqns, whole.phases, whole.layers)
    within = by_weight(whole.eqns, whole.phases, whole.layers)
    found = []
    for cuts in ([1], [1, 3], [1, 2], [1, 2, 3], [2]):
        staging = with_split_backward(assign_stages(layering, cuts, program.jaxpr.outvars))
        delayed = {k for k in staging.by_weight or () if staging.stages[k]}
        assert delayed <= at_most
        found.append(delayed <= within)
    assert not all(found)
    products = [k for k in at_most if whole.eqns[k].primitive.name == "dot_general"]
    assert len(products) == 4  # the cotangents' products are waited for


def test_each_part_is_a_task_that_reads_what_the_other_left(split):
    program, staging = split
    tasks = {task.spec.name: task.spec for task in build_tasks(program, staging).tasks}
    assert "backward_input.0" not in tasks
    assert not any(name.startswith("backward.") for name in tasks)
    by_input, later = tasks["backward_input.1"], tasks["backward_weight.1"]
    assert set(by_input.outputs) & set(later.inputs)
    assert set(by_input.outputs) & set(tasks["backward_weight.0"].inputs)
    assert len(later.donated) == 2  # the accumulators of two weights
