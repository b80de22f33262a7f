"""What slices make of values known before the step, in dims that tokens share with others."""

import jax
import jax.numpy as jnp
import pytest
from sliced_steps import CAUSAL, TOKENS, attention, check, step_of

WIDTH, BATCH = 4, 2


def dropped(*shape):
    def of(x):
        kept = jax.random.bernoulli(jax.random.key(1), 0.5, shape)
        return (x.reshape(shape) * kept).reshape(x.shape)

    return of


SHARED = {
    "tokens x width": lambda x: x * 0.1 * jnp.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH),
    "width x tokens": lambda x: x * 0.1 * jnp.arange(TOKENS * WIDTH).reshape(WIDTH, TOKENS).T,
    "batch x tokens": lambda x: x * 0.1 * jnp.arange(BATCH * TOKENS).reshape(BATCH, TOKENS, 1),
    "dropout of [batch x tokens, width]": dropped(BATCH * TOKENS, WIDTH),
    "dropout of [batch, tokens x width]": dropped(BATCH, TOKENS * WIDTH),
}


@pytest.mark.parametrize("scaled", SHARED.values(), ids=SHARED)
def test_positions_and_random_bits_in_merged_dims_are_those_of_the_step(scaled):
    mixed = attention(lambda scores, _: jax.nn.softmax(jnp.where(CAUSAL, scores, -jnp.inf)))
    check(*step_of(lambda weights, x: scaled(mixed(weights, x))), (5, 7))
