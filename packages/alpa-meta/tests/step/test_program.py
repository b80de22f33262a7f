"""The user's step as a flat program: paths, aliases, microbatches, refusals."""

import jax
import jax.numpy as jnp
import pytest
from counting_step import BATCH, STATE, step

from alpa_meta.compat import shape_of
from alpa_meta.errors import PlanError
from alpa_meta.step.program import Step


def test_inputs_have_the_paths_a_user_would_write_and_roles():
    program = Step(step, (STATE, BATCH)).program(1)
    assert [(leaf.path, leaf.role) for leaf in program.inputs] == [
        ("state['count']", "state"),
        ("state['w']", "state"),
        ("batch['x']", "batch"),
    ]
    assert program.aliases == (0, 1, None)
    assert program.outputs == ("[0]['count']", "[0]['w']", "[1]['loss']")


def test_a_microbatch_is_a_part_of_the_batch():
    flat = Step(step, (STATE, BATCH))
    assert flat.batch_size == 8
    assert shape_of(flat.program(4).jaxpr.invars[2]) == (2, 4)
    assert flat.program(4) is flat.program(4)
    with pytest.raises(PlanError, match="which 3 microbatches do not divide"):
        flat.program(3)


def test_arrays_of_another_first_dim_are_passed_as_an_argument_of_their_own_to_be_cut():
    def graph_step(w, nodes, edges):
        return w - jax.grad(lambda w: (nodes[edges] @ w).sum())(w)

    def as_one(w, graph):
        return graph_step(w, graph["nodes"], graph["edges"])

    w, nodes, edges = jnp.ones(4), jnp.ones((8, 4)), jnp.zeros(24, jnp.int32)
    whole = Step(as_one, (w, {"nodes": nodes, "edges": edges}))
    assert (whole.batch_size, whole.microbatch_counts) == (None, (1,))
    assert whole.inexact == (whole.uncut,)
    assert [leaf.role for leaf in whole.program(1).inputs] == ["state", "batch", "batch"]
    sizes = r"graph\['edges'\] int32\[24\], graph\['nodes'\] float32\[8, 4\]; pass those"
    with pytest.raises(PlanError, match=f"^2 microbatches .* differ in their first dim: {sizes}"):
        whole.program(2)
    apart = Step(graph_step, (w, nodes, edges), batch_argnums=(1,))
    assert (apart.batch_size, apart.microbatch_counts) == (8, (1, 2, 4, 8))


def test_a_step_written_for_one_batch_size_is_cut():
    def cached(state, batch):
        if len(batch["x"]) != 8:
            raise LookupError("only eight")
        return step(state, batch)

    flat = Step(cached, (STATE, BATCH))
    assert not flat.program(2).inexact


def test_leaves_that_are_no_arrays_are_kept_and_given_back():
    def apply(state, batch):
        function, weight = state
        gradient = jax.grad(lambda w: function(batch @ w).mean())(weight)
        return (function, weight - gradient)

    flat = Step(apply, ((jnp.tanh, STATE["w"]), BATCH["x"]))
    tree, kept, arrays, _ = flat.output_tree
    assert kept == (jnp.tanh, None)
    assert arrays == (False, True)


def test_a_call_of_another_structure_is_refused():
    flat = Step(step, (STATE, BATCH))
    with pytest.raises(PlanError, match="another structure of arguments"):
        flat.flatten(({"w": STATE["w"]}, BATCH))


def test_the_signature_names_every_input():
    assert Step(step, (STATE, BATCH)).program(1).signature()[1] == ("state['w']", (4, 4), "float32")
