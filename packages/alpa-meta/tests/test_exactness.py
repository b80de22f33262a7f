"""Why microbatches would change what a step computes."""

import jax
import jax.numpy as jnp

from alpa_meta.program import Step

SHAPE = jax.ShapeDtypeStruct
STATE = {"w": SHAPE((4, 4), jnp.float32), "count": SHAPE((), jnp.int32)}
BATCH = {"x": SHAPE((8, 4), jnp.float32)}


def step(state, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - gradient, "count": state["count"] + 1}, {"loss": value}


def test_an_exact_step_has_nothing_against_microbatches_and_a_mixing_one_says_why():
    assert Step(step, (STATE, BATCH)).program(2).inexact == ()

    def normalising(state, batch):
        def loss(w):
            return jnp.mean((batch["x"] / jnp.std(batch["x"])) @ w)

        return {**state, "w": state["w"] - jax.grad(loss)(state["w"])}

    (reason,) = Step(normalising, (STATE, BATCH)).program(2).inexact
    assert "test_exactness.py" in reason
    assert "mixes examples" in reason


def test_work_on_examples_after_the_update_is_a_reason():
    def evaluating(state, batch):
        updated, _ = step(state, batch)
        return updated, jnp.mean((batch["x"] @ updated["w"]) ** 2)

    (reason,) = Step(evaluating, (STATE, BATCH)).program(2).inexact
    assert "after the update" in reason
