"""What a mask leaves of later tokens, or does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sliced_steps import CAUSAL, TOKENS, attention, check, cut, program, step_of

from alpa_meta.token_slices.values import SlicingError


def scaled(constant, times, factor=0.01):
    def weigh(scores, _):
        scores = jnp.where(CAUSAL, scores, constant)
        for _ in range(times):
            scores = scores * factor
        return jax.nn.softmax(scores)

    return weigh


def plus(bias):
    return lambda scores, weights: jax.nn.softmax(scores + bias(weights))


def learned_and_scaled(weights):
    bias = jnp.where(CAUSAL, 0.0, -1e9) + weights["m"]
    return bias * 1e-2 * 1e-2 * 1e-2 * 1e-2


def _third():
    return (jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)) % 3 == 0


def largest(mask, other=None):
    """Attend to the key of the largest score, or where two maskings agree."""

    def weigh(scores, _):
        scores = jnp.where(mask, scores, -jnp.inf)
        compared = scores.max(-1, keepdims=True) if other is None else other(scores)
        return (scores == compared).astype(float)

    return weigh


def lesser(mask, live, masked):
    return lambda scores, _: jax.nn.softmax(jnp.minimum(scores, jnp.where(mask, live, masked)))


def with_sink(mask, front, constant=-1e30):
    """Attend to a sink beside the keys, all masked together."""

    def weigh(scores, weights):
        sink = jnp.broadcast_to(weights["w"][0], (*scores.shape[:-1], 1))
        order = slice(None, None, 1 if front else -1)
        seen = jnp.ones((TOKENS, 1), bool)
        both, masks = ((sink, scores)[order], (seen, mask)[order])
        joined = jnp.where(jnp.concatenate(masks, -1), jnp.concatenate(both, -1), constant)
        return jax.nn.softmax(joined)[..., 1 if front else 0 : None if front else -1]

    return weigh


def counted(more=0):
    """Mask by numbers that are running sums of ones."""

    def weigh(scores, _):
        here, there = (jnp.cumsum(jnp.ones(TOKENS, int)) for _ in range(2))
        return jax.nn.softmax(jnp.where(here[:, None] + more >= there, scores, -1e30))

    return weigh


LONGEST = TOKENS + 4


def buffered(more=0, constant=-jnp.inf, start=0):
    """Mask by the front of a mask for the longest sequence, as a model has it in a buffer."""

    def weigh(scores, _):
        places = jnp.arange(LONGEST)
        mask = places[:, None] + more >= places
        mask = lax.dynamic_slice(mask, (start, 0), (TOKENS, TOKENS))
        return jax.nn.softmax(jnp.where(mask, scores, constant))

    return weigh


BUFFER = np.where(np.tri(LONGEST, dtype=bool), 0.0, -1e9)

MASKED = {
    "the front of a longer mask": buffered(),
    "the front of a longer mask, -1e30": buffered(constant=-1e30),
    "the front of a constant": plus(lambda _: jnp.asarray(BUFFER)[:TOKENS, :TOKENS]),
    "the lesser of scores and a mask": lesser(CAUSAL, jnp.inf, -1e30),
    "the lesser of scores and a finite mask": lesser(CAUSAL, 1e30, -1e30),
    "the largest score of a row": largest(CAUSAL),
    "-1e30, scaled three times": scaled(-1e30, 3),
    "-1e9 / sqrt(head dim)": scaled(-1e9, 1, 1 / 16),
    "the root of 1e30": plus(lambda _: -jnp.sqrt(jnp.where(CAUSAL, 0.0, 1e30))),
    "the least of float16, widened": plus(
        lambda _: jnp.where(CAUSAL, 0, jnp.finfo("float16").min).astype("float16").astype(float)
    ),
    "a sink in front, masked with the keys": with_sink(CAUSAL, True),
    "a sink behind, masked with the keys": with_sink(CAUSAL, False, -jnp.inf),
    "running sums of ones": counted(),
    "every third token": plus(lambda _: jnp.where(CAUSAL & _third(), 0.0, -1e30)),
}


@pytest.mark.parametrize("weigh", MASKED.values(), ids=MASKED)
def test_masks_that_leave_nothing_of_later_tokens_are_proved(weigh):
    check(*step_of(attention(weigh)), (5, 7))


def of_rows(mask):
    """Attend by weights that each token makes for all places, not only for those up to its own."""

    def mixed(weights, x):
        return jax.nn.softmax(jnp.where(mask, x @ weights["m"][: x.shape[-1]], -jnp.inf)) @ x

    return mixed


def test_weights_of_all_keys_are_cut_to_those_up_to_a_slice():
    check(*step_of(of_rows(CAUSAL)), (5, 7))
    step, args = step_of(of_rows(jnp.tri(TOKENS, k=1, dtype=bool)))
    with pytest.raises(SlicingError, match="no mask was proved to leave out"):
        cut(program(step, args), (5, 7))


LEAKING = {
    "the front of a longer mask of one token more": buffered(1),
    "rows of a longer mask from the second on": buffered(start=1),
    "a sink in front of keys of one token more": with_sink(np.tri(TOKENS, k=1, dtype=bool), True),
    "a sink behind keys of one token more": with_sink(np.tri(TOKENS, k=1, dtype=bool), False),
    "running sums of ones, and one more": counted(1),
    "the lesser of scores and a mask of one token more": lesser(jnp.tri(TOKENS, k=1), 1e30, -1e30),
    "-1e9, scaled four times": scaled(-1e9, 4),
    "-1e9, scaled by 1e-9": scaled(-1e9, 1, 1e-9),
    "a bias of weights, scaled four times": plus(learned_and_scaled),
    "roots of 1e30": plus(lambda _: -(jnp.where(CAUSAL, 0.0, 1e30) ** (1 / 32))),
    "the largest score of a row without keys": largest(CAUSAL & ~jnp.eye(TOKENS, dtype=bool)),
    "scores masked twice": largest(CAUSAL, lambda scores: jnp.where(scores > 0, scores, -jnp.inf)),
    "clipped scores": lambda scores, _: jax.nn.softmax(
        jnp.clip(jnp.where(CAUSAL, scores, -1e30), -20, 20)
    ),
}


@pytest.mark.parametrize("weigh", LEAKING.values(), ids=LEAKING)
def test_masks_that_leave_something_of_later_tokens_are_refused(weigh):
    step, args = step_of(attention(weigh))
    with pytest.raises(SlicingError, match="no mask was proved to leave out"):
        cut(program(step, args), (5, 7))
