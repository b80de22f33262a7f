"""The user's step as a flat program: paths, roles, aliases, microbatches, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.errors import PlanError
from alpa_meta.program import Step, is_array

SHAPE = jax.ShapeDtypeStruct
STATE = {"w": SHAPE((4, 4), jnp.float32), "count": SHAPE((), jnp.int32)}
BATCH = {"x": SHAPE((8, 4), jnp.float32)}


def step(state, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - gradient, "count": state["count"] + 1}, {"loss": value}


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
    assert flat.program(4).jaxpr.invars[2].aval.shape == (2, 4)
    assert flat.program(4) is flat.program(4)
    with pytest.raises(PlanError, match="which 3 microbatches do not divide"):
        flat.program(3)


def test_arguments_may_be_named_as_the_batch():
    def backwards(batch, weight):
        return batch, weight - jax.grad(lambda w: (batch @ w).mean())(weight)

    weight = SHAPE((4, 4), jnp.float32)
    with pytest.raises(PlanError, match="no argument of the step looks like a batch"):
        Step(backwards, (weight, weight)).program(1)
    named = Step(backwards, (weight, weight), batch_argnums=(0,)).program(1)
    assert [leaf.role for leaf in named.inputs] == ["batch", "state"]


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_keys_and_scalars_are_no_batch(key):
    def noisy(state, batch, key, rate):
        noise = jax.random.normal(key, (4, 4))
        gradient = jax.grad(lambda w: ((batch["x"] @ (w + noise)) ** 2).mean())(state["w"])
        return {**state, "w": state["w"] - rate * gradient}

    program = Step(noisy, (STATE, BATCH, key, 0.1)).program(2)
    assert [leaf.role for leaf in program.inputs[2:]] == ["batch", "constant", "constant"]


def test_leaves_that_are_no_arrays_are_kept_and_given_back():
    def apply(state, batch):
        function, weight = state
        gradient = jax.grad(lambda w: function(batch @ w).mean())(weight)
        return (function, weight - gradient)

    flat = Step(apply, ((jnp.tanh, STATE["w"]), BATCH["x"]))
    tree, kept, arrays, _ = flat.output_tree
    assert kept == (jnp.tanh, None)
    assert arrays == (False, True)
    assert [is_array(leaf) for leaf in (jnp.tanh, 1, 2.0, np.ones(2), "no", None)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_state_that_is_a_list_may_be_the_whole_result(kind):
    def descend(state, batch):
        gradient = jax.grad(lambda w: (batch["x"] @ w).mean())(state[0])
        return kind([state[0] - gradient, state[1]])

    state = kind([STATE["w"], STATE["w"]])
    program = Step(descend, (state, BATCH)).program(2)
    assert [leaf.role for leaf in program.inputs] == ["state", "state", "batch"]
    assert program.aliases == (0, 1)


def test_a_call_of_another_structure_is_refused():
    flat = Step(step, (STATE, BATCH))
    with pytest.raises(PlanError, match="another structure of arguments"):
        flat.flatten(({"w": STATE["w"]}, BATCH))


def test_an_exact_step_has_nothing_against_microbatches_and_a_mixing_one_says_why():
    assert Step(step, (STATE, BATCH)).program(2).inexact == ()

    def normalising(state, batch):
        def loss(w):
            return jnp.mean((batch["x"] / jnp.std(batch["x"])) @ w)

        return {**state, "w": state["w"] - jax.grad(loss)(state["w"])}

    (reason,) = Step(normalising, (STATE, BATCH)).program(2).inexact
    assert "test_program.py" in reason
    assert "mixes examples" in reason


def test_the_signature_names_every_input():
    assert Step(step, (STATE, BATCH)).program(1).signature()[1] == ("state['w']", (4, 4), "float32")
