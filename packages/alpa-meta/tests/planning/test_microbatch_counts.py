"""Which numbers of microbatches are planned for."""

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.errors import PlanError
from alpa_meta.options import Options
from alpa_meta.planning.microbatch_counts import larger_counts, microbatch_counts_of, refusal
from alpa_meta.step.program import Step

WEIGHTS = jax.ShapeDtypeStruct((8, 8), jnp.float32)
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def _step(loss_of):
    def step(weights, batch):
        value, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return weights - 0.1 * gradients, value

    return Step(step, (WEIGHTS, BATCH))


def _mean(weights, batch):
    return jnp.mean(jnp.tanh(batch @ weights))


def _normalised_twice(weights, batch):
    x = batch @ weights
    x = jnp.tanh((x - x.mean(0)) / (x.std(0) + 1e-3)) @ weights
    return jnp.mean(((x - x.mean(0)) / (x.std(0) + 1e-3)) ** 4)


def test_a_mean_over_examples_may_be_cut():
    step = _step(_mean)
    counts, uncut = microbatch_counts_of(step, Options())
    assert max(counts) > 1 and not uncut and not refusal(step, 4, Options())
    assert larger_counts(4, step, Options()) == [16]


def test_statistics_of_statistics_are_taken_whole_and_say_why():
    step = _step(_normalised_twice)
    counts, uncut = microbatch_counts_of(step, Options())
    assert counts == [1] and uncut
    assert refusal(step, 2, Options()) and not larger_counts(1, step, Options(num_microbatches=1))


def test_a_given_number_that_would_change_the_result_is_refused():
    with pytest.raises(PlanError, match="exact=False"):
        microbatch_counts_of(_step(_normalised_twice), Options(num_microbatches=4))
