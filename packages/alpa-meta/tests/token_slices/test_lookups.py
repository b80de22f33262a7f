"""Tokens looked up, or written, at places that are computed: a loss on each sequence's last one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from sliced_steps import CAUSAL, TOKENS, attention, check, cut, program

from alpa_meta.token_slices.values import SlicingError

BATCH, WIDTH = 2, 4
LAST = jnp.array([6, 11])
EACH = jnp.arange(BATCH)


def mixed(weights, x):
    weigh = attention(lambda s, _: jax.nn.softmax(jnp.where(CAUSAL, s, -jnp.inf)))
    return x + weigh(weights, x @ weights["v"])


def step(loss):
    """Return the loss and gradients of `loss(weights, x, last)` as a step."""
    return lambda weights, batch: jax.value_and_grad(loss)(weights, *batch)


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {n: jax.random.normal(k, (WIDTH, WIDTH), float) for n, k in zip("qkv", keys)}
    return weights, (jax.random.normal(keys[3], (BATCH, TOKENS, WIDTH), float), LAST)


def flat(y, last):
    return y.reshape(BATCH * TOKENS, WIDTH)[EACH * TOKENS + last]


def sliced_out(y, last):
    return jax.vmap(lambda one, place: lax.dynamic_slice_in_dim(one, place, 1, 0)[0])(y, last)


TAKEN = {
    "take_along_axis": lambda y, last: jnp.take_along_axis(y, last[:, None, None], 1)[:, 0],
    "two index arrays": lambda y, last: y[EACH, last],
    "dynamic slices": sliced_out,
    "one dynamic slice": lambda y, _: lax.dynamic_slice_in_dim(y, TOKENS - 1, 1, 1)[:, 0],
    "of all tokens in one dim": flat,
    "several": lambda y, last: jnp.take_along_axis(y, (last[:, None] - EACH)[..., None], 1),
    "moved inside": lambda y, last: jnp.take(y, jnp.array([3, TOKENS + 4]), 1, mode="clip"),
    "of the batch": lambda y, last: y[EACH, (jnp.arange(TOKENS) <= last[:, None]).sum(-1) - 1],
}


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_a_loss_on_tokens_at_computed_places(taken):
    def loss(weights, x, last):
        return jnp.mean(jnp.tanh(taken(mixed(weights, x), last)) ** 2)

    check(step(loss), arguments(), (5, 4, 3))


def test_slices_write_the_tokens_at_computed_places_that_they_have():
    def loss(weights, x, last):
        x = (x @ weights["v"]).at[EACH, last].set(weights["q"][0])
        return jnp.mean(mixed(weights, x.at[EACH, last - 3].add(1.0)) ** 2)

    check(step(loss), arguments(), (5, 4, 3))


def added_to_all(x, last):
    return x + x[EACH, last][:, None]


def next_one(x, _):
    return x + x[:, jnp.minimum(jnp.arange(TOKENS) + 1, TOKENS - 1)]


def written_elsewhere(x, last):
    return x.at[EACH, last - 5].set(x[EACH, last])


@pytest.mark.parametrize("look", [added_to_all, next_one, written_elsewhere])
def test_tokens_that_look_others_up_are_refused(look):
    def loss(weights, x, last):
        return jnp.mean(mixed(weights, look(x @ weights["v"], last)) ** 2)

    with pytest.raises(SlicingError, match="known after the last slice: gather"):
        cut(program(step(loss), arguments()), (5, 4, 3))
