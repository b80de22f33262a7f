"""Which inputs of a step are state, which the batch, and which neither."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.errors import PlanError
from alpa_meta.step.program import Step

SHAPE = jax.ShapeDtypeStruct
STATE = {"w": SHAPE((4, 4), jnp.float32), "count": SHAPE((), jnp.int32)}
BATCH = {"x": SHAPE((8, 4), jnp.float32)}


def test_arguments_may_be_named_as_the_batch():
    def backwards(batch, weight):
        return batch, weight - jax.grad(lambda w: (batch @ w).mean())(weight)

    weight = SHAPE((4, 4), jnp.float32)
    with pytest.raises(PlanError, match="no argument of the step looks like a batch"):
        Step(backwards, (weight, weight)).program(2)
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


def test_weights_that_a_step_only_reads_are_no_batch():
    def distil(state, teacher, batch, labels):
        def loss(w):
            wanted = jnp.tanh(batch["x"] @ teacher["w"]) @ teacher["out"]
            return jnp.mean((batch["x"] @ w - wanted) ** 2 * labels[:, None])

        return {**state, "w": state["w"] - jax.grad(loss)(state["w"])}

    teacher = {"w": SHAPE((4, 16), jnp.float32), "out": SHAPE((16, 4), jnp.float32)}
    step = Step(distil, (STATE, teacher, BATCH, SHAPE((8,), jnp.float32)))
    roles = [leaf.role for leaf in step.program(2).inputs]
    assert roles == ["state", "state", "constant", "constant", "batch", "batch"]
    assert not step.inexact


def test_state_is_what_a_result_is_fewest_operations_from():
    def distil(teacher, state, batch):
        def loss(w):
            return jnp.mean((batch["x"] @ w - batch["x"] @ teacher["w"]) ** 2)

        gradient = {**state, "w": jax.grad(loss)(state["w"])}
        return {**state, "w": state["w"] - gradient["w"]}, gradient

    program = Step(distil, (STATE, STATE, BATCH)).program(1)
    assert [leaf.role for leaf in program.inputs[2:4]] == ["state", "state"]
    assert program.aliases[:2] == (2, 3)


def test_arguments_of_unlike_first_dims_are_all_the_batch_until_named():
    def weigh(state, batch, classes):
        gradient = jax.grad(lambda w: (batch["x"] @ w * classes).mean())(state["w"])
        return {**state, "w": state["w"] - gradient}

    args = (STATE, BATCH, SHAPE((4,), jnp.float32))
    with pytest.raises(PlanError, match="differ in their first dim"):
        Step(weigh, args).program(2)
    assert not Step(weigh, args, batch_argnums=(1,)).inexact


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_state_that_is_a_list_may_be_the_whole_result(kind):
    def descend(state, batch):
        gradient = jax.grad(lambda w: (batch["x"] @ w).mean())(state[0])
        return kind([state[0] - gradient, state[1]])

    state = kind([STATE["w"], STATE["w"]])
    program = Step(descend, (state, BATCH)).program(2)
    assert [leaf.role for leaf in program.inputs] == ["state", "state", "batch"]
    assert program.aliases == (0, 1)
