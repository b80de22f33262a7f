"""Attention sinks: scores of no key, joined with those of the keys for the softmax alone."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from sliced_steps import CAUSAL, TOKENS, attention, check, cut, program, step_of

from alpa_meta.token_slices.values import SlicingError


def sunk(front=0, after=1, mask=CAUSAL, constant=-1e30, taken=None, weigh=jax.nn.softmax):
    """Attend with as many sinks in front of the keys and after them; return weights of the keys, or
    those from `taken` on."""

    def of(scores, weights):
        sinks = [
            jnp.broadcast_to(weights["w"][:count], (*scores.shape[:-1], count))
            for count in (front, after)
        ]
        scores = jnp.where(mask, scores, constant)
        found = weigh(jnp.concatenate([sinks[0], scores, sinks[1]], -1))
        start = front if taken is None else taken
        return found[..., start : start + TOKENS]

    return attention(of)


def layers(mixed):
    layer = jax.checkpoint(lambda weights, x: x + mixed(weights, x))
    return lambda weights, x: lax.scan(lambda x, _: (layer(weights, x), None), x, length=2)[0]


def counted(scores):
    """Return weights of each key that its place counts for."""
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, scores.shape)
    return jax.nn.softmax(scores) * jnp.arange(1.0, scores.shape[-1] + 1) * kept


CAUSAL_STEPS = {
    "one after": sunk(),
    "two in front": sunk(2, 0),
    "in front and after, recomputed by layer": layers(sunk(1, 2)),
    "with weights by place, and dropout": sunk(1, 1, weigh=counted),
}


@pytest.mark.parametrize("mixed", CAUSAL_STEPS.values(), ids=CAUSAL_STEPS)
def test_every_slice_has_the_sinks(mixed):
    check(*step_of(mixed), (5, 1, 6))


REFUSED = {
    "a key ahead": (sunk(mask=jnp.tri(TOKENS, k=1, dtype=bool)), "reads tokens after its own"),
    "no key of its own": (sunk(mask=jnp.tri(TOKENS, k=-1, dtype=bool)), "with a finite constant"),
    "weights of the keys before": (sunk(1, taken=0), "cuts, joins or reorders"),
    "weights of the keys behind": (sunk(1, taken=2), "different places"),
    "no softmax": (sunk(weigh=jnp.tanh), "no mask was proved to leave out"),
}


@pytest.mark.parametrize(("mixed", "reason"), REFUSED.values(), ids=REFUSED)
def test_sinks_do_not_let_later_keys_in(mixed, reason):
    step, args = step_of(mixed)
    with pytest.raises(SlicingError, match=reason):
        cut(program(step, args), (5, 7))
