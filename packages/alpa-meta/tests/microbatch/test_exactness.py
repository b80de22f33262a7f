"""Why microbatches would change what a step computes."""

import jax
import jax.numpy as jnp
import pytest
from counting_step import BATCH, STATE, step

from alpa_meta.step.program import Step


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


def test_a_sum_over_the_batch_that_is_read_too_early_is_named():
    def two_updates(state, batch):
        first, _ = step(state, batch)
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(batch["x"] @ w)))(first["w"])
        return {**first, "w": first["w"] - gradient}

    (reason,) = Step(two_updates, (STATE, BATCH)).program(2).inexact
    assert "works on a sum over all of them, which no microbatch has" in reason


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_a_step_that_is_another_program_for_the_whole_batch_is_refused(num_microbatches):
    """Microbatches of all these sizes agree with those of twice the size, which sum too."""

    def by_size(state, batch):
        def loss(w):
            errors = (batch["x"] @ w).sum(1)
            return errors.mean() if len(batch["x"]) == 16 else errors.sum()

        return {**state, "w": state["w"] - jax.grad(loss)(state["w"])}

    batch = {"x": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    (reason,) = Step(by_size, (STATE, batch)).program(num_microbatches).inexact
    size = 16 // num_microbatches
    assert f"another program for {size} examples than for 16: they differ from " in reason
    assert "test_exactness.py" in reason


def test_a_constant_of_the_whole_batch_is_not_taken_for_that_of_a_microbatch():
    def at_least_eight(state, batch):
        def loss(w):
            return (batch["x"] @ w).sum() / max(len(batch["x"]), 8)

        return {**state, "w": state["w"] - jax.grad(loss)(state["w"])}

    batch = {"x": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    assert Step(at_least_eight, (STATE, batch)).program(2).inexact == ()
    assert Step(at_least_eight, (STATE, batch)).program(4).inexact


def test_metrics_of_examples_with_values_of_their_own_are_no_reason():
    def measured(state, batch):
        updated, _ = step(state, batch)
        scores = batch["x"] @ state["w"] + jnp.arange(4.0)
        counts = jnp.zeros(4, int).at[scores.argmax(1)].add(1)
        return updated, {"largest": scores.max(), "counts": counts}

    assert Step(measured, (STATE, BATCH)).program(2).inexact == ()
