"""Attention by blocks of queries: a loop over blocks that look back on all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from sliced_steps import TOKENS, check, cut, program, step_of

import alpa_meta as alpa
from alpa_meta.compat import open_jaxpr
from alpa_meta.token_slices.values import SlicingError

BLOCK = 3
NUMBERS = np.arange(TOKENS // BLOCK)
WITHIN = np.arange(BLOCK)


def own(number):
    return number * BLOCK + WITHIN


def by_blocks(
    places=own, numbers=NUMBERS, constant=-jnp.inf, wrap=lambda block: block, run=lax.map
):
    """Attend by blocks of queries, each at its `places`, to the keys up to them."""

    def mixed(weights, x):
        queries, keys = x @ weights["q"], x @ weights["k"]

        @wrap
        def block(given):
            number, queries = given
            scores = jnp.einsum("btd,bsd->bts", queries, keys)
            seen = places(number)[:, None] >= jnp.arange(TOKENS)
            weigh = jax.nn.softmax(jnp.where(seen, scores, constant))
            return jnp.einsum("bts,bsd->btd", weigh, x)

        blocks = jnp.moveaxis(queries.reshape(len(x), -1, BLOCK, x.shape[-1]), 1, 0)
        found = run(block, (jnp.asarray(numbers), blocks))
        return jnp.moveaxis(found, 0, 1).reshape(x.shape)

    return mixed


def scanned(block, given):
    return lax.scan(lambda _, one: (None, block(one)), None, given)[1]


def summed(block, given):
    """Hand on what the blocks before made."""
    zero = jnp.zeros(given[1].shape[1::2])

    def advance(state, one):
        made = block(one)
        return jnp.tanh(state + made.sum(1)), made + state[:, None]

    return lax.scan(advance, zero, given)[1]


def layers(mixed):
    return lambda weights, x: lax.scan(lambda x, _: (x + mixed(weights, x), None), x, length=2)[0]


def recomputed(mixed):
    return lambda weights, x: jax.checkpoint(mixed)(weights, x)


CAUSAL_STEPS = {
    "map": by_blocks(),
    "the keys of the own block": by_blocks(lambda number: number * BLOCK + BLOCK - 1 + 0 * WITHIN),
    "a state from block to block": by_blocks(run=summed),
    "scan": by_blocks(run=scanned),
    "recomputed layers of recomputed blocks": layers(recomputed(by_blocks(wrap=jax.checkpoint))),
    "-1e30, recomputed": recomputed(by_blocks(constant=-1e30)),
    "first places": by_blocks(lambda first: first + WITHIN, NUMBERS * BLOCK),
    # parts that stand above, alone or together with others
    "each block recomputed": by_blocks(wrap=jax.checkpoint),
    "recomputed": recomputed(by_blocks()),
    "-1e30": by_blocks(constant=-1e30),
    "-1e9, each block recomputed": by_blocks(constant=-1e9, wrap=jax.checkpoint),
}


@pytest.mark.sample(mixed=3)
@pytest.mark.parametrize("mixed", CAUSAL_STEPS.values(), ids=CAUSAL_STEPS)
def test_blocks_of_queries_look_back_on_the_keys_up_to_the_slice(mixed):
    check(*step_of(mixed), (3, 6, 3))


def test_each_slice_loops_over_its_own_blocks():
    sliced = cut(program(*step_of(by_blocks())), (3, 9))
    loops = [eqn for eqn in open_jaxpr(sliced.closed).eqns if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in loops] == [1, 3, 3, 1]


def reverse(block, given):
    zero = jnp.zeros(given[1].shape[1::2])

    def advance(state, one):
        made = block(one)
        return state + made.sum(1), made + state[:, None]

    return lax.scan(advance, zero, given, reverse=True)[1]


UNKNOWN = "reads tokens after its own"
REFUSED = {
    "one key ahead": (by_blocks(lambda number: own(number) + 1), UNKNOWN),
    "a key of the next block": (
        by_blocks(lambda number: (number + 1) * BLOCK + 0 * WITHIN),
        UNKNOWN,
    ),
    "blocks numbered from the last": (by_blocks(numbers=NUMBERS[::-1].copy()), UNKNOWN),
    "blocks too far apart": (by_blocks(lambda number: number * (BLOCK + 1) + WITHIN), UNKNOWN),
    "no mask": (by_blocks(lambda number: own(number) + TOKENS), UNKNOWN),
    "a recomputed one": (recomputed(by_blocks(lambda n: own(n) + 1, wrap=jax.checkpoint)), UNKNOWN),
    "a state from later blocks": (by_blocks(run=reverse), "against the order of the slices"),
    "-1e30, one key ahead": (by_blocks(lambda number: own(number) + 1, constant=-1e30), UNKNOWN),
    "-1e30, blocks numbered from the last": (
        by_blocks(numbers=NUMBERS[::-1].copy(), constant=-1e30),
        UNKNOWN,
    ),
    "rows of blocks too near": (
        by_blocks(lambda number: number * (BLOCK - 1) + WITHIN - 1, constant=-1e30),
        "masks with a finite constant",
    ),
    "the first place for every row": (
        by_blocks(lambda number: number * BLOCK - 1 + 0 * WITHIN, constant=-1e30),
        "masks with a finite constant",
    ),
    "some rows without keys": (
        by_blocks(lambda number: own(number) - 1, constant=-1e30),
        "masks with a finite constant",
    ),
}


@pytest.mark.parametrize(("mixed", "reason"), REFUSED.values(), ids=REFUSED)
def test_blocks_that_are_not_causal_are_refused_with_the_line(mixed, reason):
    step, args = step_of(mixed)
    with pytest.raises(SlicingError, match=reason) as refused:
        cut(program(step, args), (6, 6))
    assert "test_blocks.py" in str(refused.value)


def alone(turned):
    """Attend to the key of one row, masked by both dims of as many elements as a block has rows."""

    def mixed(weights, x):
        def block(given):
            number, queries = given
            scores = jnp.einsum("btd,bsd->bts", queries, x @ weights["k"])
            same = own(number)[:, None] == jnp.arange(TOKENS)
            scores = jnp.where(same, scores, -1e30)
            scores = jnp.where(same[:, None] if turned else same, scores, -1e30)
            return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)

        blocks = jnp.moveaxis(x.reshape(len(x), -1, BLOCK, x.shape[-1]), 1, 0)
        return jnp.moveaxis(lax.map(block, (NUMBERS, blocks)), 0, 1).reshape(x.shape)

    return mixed


def test_rows_are_those_of_the_block_not_others_of_as_many():
    check(*step_of(alone(False)), (3, 9))
    step, args = step_of(alone(True), batch=BLOCK)
    with pytest.raises(SlicingError, match="masks with a finite constant"):
        cut(program(step, args), (3, 9))


def test_two_stages_of_blocks_give_what_one_device_does():
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    layer = by_blocks(wrap=jax.checkpoint)

    def step(state, x):
        def loss(layers):
            y = x
            for one in layers:
                y = jnp.tanh(y + layer(one, y @ one["v"]))
            return jnp.mean(y**2)

        value, found = jax.value_and_grad(loss)(state[0])
        updates, moments = optimiser.update(found, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    _, (weights, x) = step_of(layer)
    both = [weights, {name: -one for name, one in weights.items()}]
    args = ((both, optimiser.init(both)), x)
    options = alpa.Options(num_stages=2, num_microbatches=1, donate=False, cache=False)
    sliced = alpa.parallelize(step, cluster="host:2", options=options, token_slices=(3, 6, 3))
    expected, found = jax.jit(step)(*args), sliced.gather(sliced(*args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)
