"""Why microbatches would change what a step computes."""

import jax
import jax.numpy as jnp
from counting_step import BATCH, STATE, step

from alpa_meta.frontend.program import Step


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
