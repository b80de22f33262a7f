"""Keys and tokens that stand in front of the tokens, such as learned prefixes and registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sliced_steps import TOKENS, attention, check, cut, program, step_of

from alpa_meta.token_slices.values import SlicingError

PREFIX = 2


def prefixed(ahead=0, constant=-1e30, own=True):
    """Attend to learned keys and to the tokens up to each, and `ahead` more."""

    def mixed(weights, x):
        keys, values = jnp.split(weights["m"][:PREFIX, : 2 * x.shape[-1]], 2, axis=-1)
        keys, values = (
            jnp.concatenate([jnp.broadcast_to(one, (len(x), *one.shape)), two], 1)
            for one, two in ((keys, x @ weights["k"]), (values, x))
        )
        scores = jnp.einsum("btd,bsd->bts", x @ weights["q"], keys)
        here, there = jnp.arange(TOKENS)[:, None] + PREFIX, jnp.arange(TOKENS + PREFIX)
        mask = (here + ahead >= there) & (own | (here != there))
        return jax.nn.softmax(jnp.where(mask, scores, constant)) @ values

    return mixed


def begun(kept=slice(1, None), offset=0, layers=1, wrap=lambda layer: layer):
    """Run layers of attention on the tokens behind a learned one; return those `kept`."""
    mask = np.tri(TOKENS + 1, k=offset, dtype=bool)
    layer = attention(lambda scores, _: jax.nn.softmax(jnp.where(mask, scores, -1e30)))

    def mixed(weights, x):
        first = jnp.broadcast_to(weights["w"], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([first, x], 1)
        for _ in range(layers):
            x = x + wrap(layer)(weights, x)
        return x[:, kept]

    return mixed


def recomputed(mixed):
    return lambda weights, x: jax.checkpoint(mixed)(weights, x)


def scanned(mixed):
    return lambda weights, x: lax.scan(lambda x, _: (x + mixed(weights, x), None), x, length=2)[0]


CAUSAL_STEPS = {
    "keys": prefixed(),
    "keys, no token sees itself": prefixed(constant=-jnp.inf, own=False),
    "keys, recomputed by layer": scanned(recomputed(prefixed())),
    "tokens, recomputed by layer": begun(layers=2, wrap=jax.checkpoint),
    "tokens, each with what the one before it made": begun(slice(-1)),
}


@pytest.mark.parametrize("mixed", CAUSAL_STEPS.values(), ids=CAUSAL_STEPS)
def test_what_stands_in_front_of_the_tokens_is_in_every_slice(mixed):
    check(*step_of(mixed), (5, 1, 6))


REFUSED = {
    "keys ahead": (prefixed(1), "reads tokens after its own"),
    "keys that may all be masked": (prefixed(own=False), "masks with a finite constant"),
    "tokens ahead": (begun(offset=1), "reads tokens after its own"),
}


@pytest.mark.parametrize(("mixed", "reason"), REFUSED.values(), ids=REFUSED)
def test_prefixes_that_are_not_causal_are_refused(mixed, reason):
    step, args = step_of(mixed)
    with pytest.raises(SlicingError, match=reason):
        cut(program(step, args), (5, 7))
