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


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_state_that_is_a_list_may_be_the_whole_result(kind):
    def descend(state, batch):
        gradient = jax.grad(lambda w: (batch["x"] @ w).mean())(state[0])
        return kind([state[0] - gradient, state[1]])

    state = kind([STATE["w"], STATE["w"]])
    program = Step(descend, (state, BATCH)).program(2)
    assert [leaf.role for leaf in program.inputs] == ["state", "state", "batch"]
    assert program.aliases == (0, 1)
