"""Tasks: which there are, what each mesh reads and writes, donation, outputs."""

import jax.numpy as jnp
import pytest
from two_matrices import BATCH, SHAPE, STATE, step

from alpa_meta.execution.accumulation import crossing_values
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.step.program import Step


def by_products(eqns, inputs):
    layers, layer = [], -1
    for eqn in eqns:
        layer += eqn.primitive.name == "dot_general"
        layers.append(max(layer, 0))
    return layers


def tasks(num_stages, num_microbatches, function=step, state=STATE):
    program = Step(function, (state, BATCH)).program(num_microbatches)
    layering = assign_layers(program, by_products)
    staging = assign_stages(layering, list(range(1, num_stages)), program.jaxpr.outvars)
    return program, staging, build_tasks(program, staging)


def names(found):
    return [task.spec.name for task in found.tasks]


def test_without_pipeline_and_microbatches_one_task_does_all():
    _, _, found = tasks(1, 1)
    assert names(found) == ["train.0"]
    assert set(found.tasks[0].spec.donated) == {"state['first']", "state['second']"}
    assert not found.accumulators


def test_microbatches_accumulate_between_a_start_and_an_update():
    program, staging, found = tasks(1, 4)
    assert names(found) == ["start.0", "train.0", "update.0", "metrics.0"]
    assert len(found.accumulators) == len(crossing_values(staging, program)) - 1
    train = found.tasks[1].spec
    assert all(name.startswith("sum of ") for name in train.donated)
    assert set(found.tasks[2].spec.donated) == {"state['first']", "state['second']"}


def test_a_pipeline_has_forward_and_backward_tasks_per_stage():
    _, _, found = tasks(2, 4)
    assert [name for name in names(found) if name.startswith(("forward", "backward"))] == [
        "forward.0",
        "forward.1",
        "backward.0",
        "backward.1",
    ]
    homes = dict(zip(found.graph.inputs, found.graph.home, strict=True))
    assert homes["state['first']"] == 0
    assert homes["state['second']"] == 1


def test_per_example_results_are_joined_and_others_reduced():
    _, _, found = tasks(1, 4)
    joined = [output.concatenate for output in found.outputs]
    assert joined.count(0) == 1
    assert sum(place is None for place in joined) == len(joined) - 1


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_inputs_that_no_task_reads_are_not_asked_for(num_microbatches):
    def with_note(state, batch):
        inner = {name: state[name] for name in STATE}
        updated, metrics = step(inner, batch)
        return {**updated, "note": state["note"]}, metrics

    state = {**STATE, "note": SHAPE((3,), jnp.float32)}
    _, _, found = tasks(1, num_microbatches, with_note, state)
    assert "state['note']" not in found.graph.inputs
    assert [output.input for output in found.outputs].count(1) == 1


def test_old_state_that_is_returned_is_not_overwritten():
    def keeping(state, batch):
        updated, _ = step(state, batch)
        return updated, state["first"]

    _, _, found = tasks(1, 1, keeping)
    assert set(found.tasks[0].spec.donated) == {"state['second']"}


def test_every_value_of_the_graph_is_written_before_it_is_read():
    for num_stages, count in ((1, 1), (1, 2), (2, 2), (2, 1)):
        _, _, found = tasks(num_stages, count)
        written = set(found.graph.inputs)
        for task in found.tasks:
            if task.spec.phase != "backward":
                assert set(task.spec.inputs) <= written
            written.update(task.spec.outputs)
        assert set(found.graph.outputs) <= written
