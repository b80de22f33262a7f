"""Attention by blocks of keys whose result is divided by the sum so far in each block, as in the
first FlashAttention."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from sliced_steps import TOKENS, check, cut, program, step_of

from alpa_meta.token_slices.values import SlicingError

BLOCK = 3


def causal(rows, keys):
    return rows[:, None] >= keys


def by_blocks(result, seen=causal, wrap=lambda advance: advance, first_sum=0.0):
    """Attend with a running softmax; `result(out, l, kept, added, sums)` is the next `out`, given
    the sum `l` before and after the block."""

    def mixed(weights, x):
        queries, rows = x @ weights["q"], jnp.arange(TOKENS)
        keys, values = (
            jnp.moveaxis(one.reshape(len(x), -1, BLOCK, x.shape[-1]), 1, 0)
            for one in (x @ weights["k"], x)
        )

        @wrap
        def advance(state, given):
            (m, l, out), (number, keys, values) = state, given
            scores = jnp.einsum("btd,bsd->bts", queries, keys)
            hidden = seen(rows, number * BLOCK + jnp.arange(BLOCK))
            scores = jnp.where(hidden, scores, -1e30)
            most = jnp.maximum(m, scores.max(-1))
            p, kept = jnp.exp(scores - most[..., None]), jnp.exp(m - most)
            sums = l * kept + p.sum(-1)
            added = jnp.einsum("bts,bsd->btd", p, values)
            per_row = (one[..., None] for one in (l, kept, sums))
            return (most, sums, result(out, added, *per_row)), None

        shape = queries.shape[:2]
        start = jnp.full(shape, -1e30), jnp.full(shape, first_sum), jnp.zeros_like(queries)
        return lax.scan(advance, start, (jnp.arange(len(keys)), keys, values))[0][2]

    return mixed


def divided(out, added, l, kept, sums):
    return (l * kept * out + added) / sums


RESULTS = {
    "quotient of sums": lambda out, added, l, kept, sums: l * kept / sums * out + added / sums,
    "all divided": divided,
    "times the inverse": lambda out, added, l, kept, sums: (
        l * kept * (1 / sums) * out + added * (1 / sums)
    ),
}


@pytest.mark.sample("result", "wrap")
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
@pytest.mark.parametrize("wrap", [lambda advance: advance, jax.checkpoint])
def test_a_result_divided_in_each_block(result, wrap):
    check(*step_of(by_blocks(result, wrap=wrap)), (3, 6, 3))


def test_scanned_layers_of_results_divided_in_each_block():
    mixed = jax.checkpoint(by_blocks(divided, wrap=jax.checkpoint))

    def layers(weights, x):
        return lax.scan(lambda x, _: (x + mixed(weights, x), None), x, length=2)[0]

    check(*step_of(layers), (6, 6))


OTHERS = {
    "more than the sum": lambda out, added, l, kept, sums: (l * kept * out + added) / (sums + 1e-3),
    "twice the sum": lambda out, added, l, kept, sums: (l * kept * out + added) / (2 * sums),
    "a guarded sum": lambda out, added, l, kept, sums: (
        (l * kept * out + added) / jnp.where(sums == 0, 1.0, sums)
    ),
    "not the sum before": lambda out, added, l, kept, sums: (kept * out + added) / sums,
    "by the sum before": lambda out, added, l, kept, sums: sums / l * out + added,
}


@pytest.mark.parametrize("result", OTHERS.values(), ids=OTHERS.keys())
def test_blocks_that_divide_by_another_number_change_the_result(result):
    with pytest.raises(SlicingError, match="changes number 2 of it"):
        cut(program(*step_of(by_blocks(result, first_sum=1.0))), (6, 6))


@pytest.mark.parametrize(
    "seen",
    [
        lambda rows, keys: rows[:, None] <= keys,
        lambda rows, keys: rows[:, None] + 1 >= keys,
        lambda rows, keys: rows[:, None] + TOKENS >= keys,
    ],
)
def test_divided_blocks_that_look_ahead_are_refused(seen):
    with pytest.raises(SlicingError, match="which no mask was proved to leave out"):
        cut(program(*step_of(by_blocks(divided, seen=seen))), (6, 6))
