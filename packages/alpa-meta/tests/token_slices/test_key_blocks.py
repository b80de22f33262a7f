"""Attention by blocks of keys with a running softmax, as flash attention is written by hand."""

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


def causal(rows, keys):
    return rows[:, None] >= keys


def where(constant):
    return lambda scores, seen: jnp.where(seen, scores, constant)


def added(constant):
    return lambda scores, seen: scores + jnp.where(seen, 0.0, constant)


def scanned(advance, start, keys, values):
    """Hand each block of keys and values to the loop."""

    def cut_up(value):
        return jnp.moveaxis(value.reshape(len(value), -1, BLOCK, value.shape[-1]), 1, 0)

    blocks = jnp.asarray(NUMBERS), cut_up(keys), cut_up(values)
    return lax.scan(lambda state, one: (advance(state, one), None), start, blocks)[0]


def counted(advance, start, keys, values):
    """Pick each block by its number."""

    def trip(number, state):
        return advance(
            state,
            (
                number,
                *(lax.dynamic_slice_in_dim(x, number * BLOCK, BLOCK, 1) for x in (keys, values)),
            ),
        )

    return lax.fori_loop(0, len(NUMBERS), trip, start)


def indexed(advance, start, keys, values):
    """Pick each block out of stacked ones, in a scan over their numbers."""
    stacked = [
        jnp.moveaxis(x.reshape(len(x), -1, BLOCK, x.shape[-1]), 1, 0) for x in (keys, values)
    ]

    def trip(state, number):
        return advance(state, (number, *(x[number] for x in stacked))), None

    return lax.scan(trip, start, jnp.arange(len(NUMBERS)))[0]


HIDDEN = where(-jnp.inf)


def flash(
    seen=causal,
    mask=HIDDEN,
    lowest=-jnp.inf,
    run=scanned,
    wrap=lambda advance: advance,
    result=lambda m, l, out: out / l[..., None],
    weigh=lambda p, number: p,
):
    """Attend by blocks of keys: `attend(queries, rows, keys, values)`."""

    def attend(queries, rows, keys, values):
        @wrap
        def advance(state, given):
            m, l, out = state
            number, keys, values = given
            scores = jnp.einsum("btd,bsd->bts", queries, keys)
            scores = mask(scores, seen(rows, number * BLOCK + jnp.arange(BLOCK)))
            most = jnp.maximum(m, scores.max(-1))
            p, kept = jnp.exp(scores - most[..., None]), jnp.exp(m - most)
            made = jnp.einsum("bts,bsd->btd", weigh(p, number), values)
            return most, l * kept + p.sum(-1), out * kept[..., None] + made

        shape = queries.shape[:2]
        start = jnp.full(shape, lowest), jnp.zeros(shape), jnp.zeros_like(queries)
        return result(*run(advance, start, keys, values))

    return attend


def whole(attend):
    """All queries at once."""
    return lambda weights, x: attend(x @ weights["q"], jnp.arange(TOKENS), x @ weights["k"], x)


def nested(attend, wrap=lambda block: block):
    """One block of queries after another."""

    def mixed(weights, x):
        queries, keys = x @ weights["q"], x @ weights["k"]

        @wrap
        def block(given):
            number, queries = given
            return attend(queries, number * BLOCK + jnp.arange(BLOCK), keys, x)

        blocks = jnp.moveaxis(queries.reshape(len(x), -1, BLOCK, x.shape[-1]), 1, 0)
        return jnp.moveaxis(lax.map(block, (jnp.asarray(NUMBERS), blocks)), 0, 1).reshape(x.shape)

    return mixed


def layers(mixed):
    return lambda weights, x: lax.scan(lambda x, _: (x + mixed(weights, x), None), x, length=2)[0]


def recomputed(mixed):
    return lambda weights, x: jax.checkpoint(mixed)(weights, x)


def window(rows, keys):
    return causal(rows, keys) & (rows[:, None] - keys < 5)


def dropped(p, number):
    kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), number), 0.7, p.shape)
    return jnp.where(kept, p / 0.7, 0.0)


def with_log_sum(m, l, out):
    return out / l[..., None] + (m + jnp.log(l))[..., None]


def by_maps(mixed_mask=causal):
    """Attend as Rabe and Staats do: every block of keys alone, and the results put together."""

    def mixed(weights, x):
        queries, keys = x @ weights["q"], x @ weights["k"]

        @jax.checkpoint
        def alone(given):
            number, keys, values = given
            scores = jnp.einsum("btd,bsd->bts", queries, keys)
            seen = mixed_mask(jnp.arange(TOKENS), number * BLOCK + jnp.arange(BLOCK))
            scores = jnp.where(seen, scores, -1e30)
            most = lax.stop_gradient(scores.max(-1))
            p = jnp.exp(scores - most[..., None])
            return jnp.einsum("bts,bsd->btd", p, values), p.sum(-1), most

        def cut_up(value):
            return jnp.moveaxis(value.reshape(len(value), -1, BLOCK, value.shape[-1]), 1, 0)

        made, sums, most = lax.map(alone, (jnp.asarray(NUMBERS), cut_up(keys), cut_up(x)))
        kept = jnp.exp(most - most.max(0))
        return (made * kept[..., None]).sum(0) / (sums * kept).sum(0)[..., None]

    return mixed


CAUSAL_STEPS = {
    "every block alone": by_maps(),
    "dropout": whole(flash(weigh=dropped)),
    "recomputed layers, picked": layers(recomputed(whole(flash(run=counted)))),
    "a window": whole(flash(seen=window, mask=where(-1e30), lowest=-1e30)),
    "all queries": whole(flash()),
    "-1e30": whole(flash(mask=where(-1e30), lowest=-1e30, wrap=jax.checkpoint)),
    "an added mask": whole(flash(mask=added(-1e9))),
    "the sums kept": whole(flash(result=with_log_sum, wrap=jax.checkpoint)),
    "blocks of queries": nested(flash()),
    "layers of blocks of queries, indexed": layers(nested(flash(run=indexed))),
    # parts that stand above, alone or together with others
    "each block recomputed": whole(flash(wrap=jax.checkpoint)),
    "picked by a count": whole(flash(run=counted)),
    "picked by a count, recomputed": whole(flash(run=counted, wrap=jax.checkpoint)),
    "indexed": whole(flash(run=indexed)),
    "recomputed blocks of queries": nested(flash(wrap=jax.checkpoint), wrap=jax.checkpoint),
    "blocks of queries, picked": nested(flash(run=counted, mask=where(-1e30)), wrap=jax.checkpoint),
    "recomputed": recomputed(whole(flash(wrap=jax.checkpoint))),
    "layers": layers(whole(flash())),
    "recomputed layers of blocks": layers(recomputed(nested(flash(run=counted)))),
}


@pytest.mark.sample(mixed=4)
@pytest.mark.parametrize("mixed", CAUSAL_STEPS.values(), ids=CAUSAL_STEPS)
def test_blocks_of_keys_up_to_the_slice_are_all_that_matter(mixed):
    check(*step_of(mixed), (3, 6, 3))


def test_each_slice_loops_over_the_blocks_up_to_its_end():
    sliced = cut(program(*step_of(whole(flash(run=counted)))), (3, 9))
    loops = [eqn for eqn in open_jaxpr(sliced.closed).eqns if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in loops] == [1, 4, 4, 1]


def ahead(rows, keys):
    return rows[:, None] + 1 >= keys


def own_block(rows, keys):
    return rows[:, None] // BLOCK >= keys // BLOCK


def next_block(rows, keys):
    return rows[:, None] // BLOCK + 1 >= keys // BLOCK


def unmasked(rows, keys):
    return rows[:, None] + TOKENS >= keys


def strict(rows, keys):
    return rows[:, None] > keys


UNKNOWN = "reads tokens after its own"
NO_KEY = "a token all of whose keys are masked"
REFUSED = {
    "one key ahead": (whole(flash(seen=ahead)), UNKNOWN),
    "the next block": (whole(flash(seen=next_block, mask=where(-1e30))), UNKNOWN),
    "no mask": (whole(flash(seen=unmasked)), UNKNOWN),
    "recomputed, one key ahead": (
        recomputed(whole(flash(seen=ahead, wrap=jax.checkpoint))),
        UNKNOWN,
    ),
    "picked, one key ahead": (whole(flash(seen=ahead, run=counted)), UNKNOWN),
    "blocks of queries, one key ahead": (nested(flash(seen=ahead)), UNKNOWN),
    "-1e30 and a first token without keys": (
        whole(flash(seen=strict, mask=where(-1e30), lowest=-1e30)),
        NO_KEY,
    ),
    "a constant that masks nothing": (whole(flash(mask=where(-10.0))), UNKNOWN),
    "probabilities masked, not scores": (
        whole(flash(mask=lambda scores, _: scores, weigh=lambda p, number: 0 * p)),
        UNKNOWN,
    ),
    "the number of keys": (whole(flash(weigh=lambda p, number: p + 1.0)), UNKNOWN),
    "maps, one key ahead": (by_maps(ahead), "tokens"),
}


@pytest.mark.parametrize(("mixed", "reason"), REFUSED.values(), ids=REFUSED)
def test_blocks_that_are_not_causal_are_refused_with_the_line(mixed, reason):
    step, args = step_of(mixed)
    with pytest.raises(SlicingError, match=reason) as refused:
        cut(program(step, args), (6, 6))
    assert "test_key_blocks.py" in str(refused.value)


def test_slices_that_end_inside_a_block_are_refused_with_what_to_do():
    with pytest.raises(SlicingError, match="multiples of 3"):
        cut(program(*step_of(whole(flash()))), (4, 8))


@pytest.mark.sample(lengths=1)
@pytest.mark.parametrize("lengths", [(6, 3, 3), (3, 9)])
def test_three_stages_of_blocks_give_what_one_device_does(lengths):
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    kinds = [whole(flash(run=counted, wrap=jax.checkpoint)), nested(flash()), whole(flash())]

    def step(state, x):
        def loss(weights):
            y = x
            for one, layer in zip(weights, kinds, strict=True):
                y = jnp.tanh(y + layer(one, y @ one["v"]))
            return jnp.mean(y**2)

        value, found = jax.value_and_grad(loss)(state[0])
        updates, moments = optimiser.update(found, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    _, (weights, x) = step_of(kinds[0])
    three = [{name: sign * one for name, one in weights.items()} for sign in (1, -1, 0.5)]
    args = ((three, optimiser.init(three)), x)
    options = alpa.Options(
        num_stages=3, num_microbatches=1, donate=False, cache=False, token_slices=lengths
    )
    sliced = alpa.parallelize(step, cluster="host:3", options=options)
    expected, found = jax.jit(step)(*args), sliced.gather(sliced(*args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12)
