"""Several documents in a sequence, in attention by blocks of keys, of queries, or both."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from sliced_steps import TOKENS, check, cut, program, step_of

from alpa_meta.step.program import Step
from alpa_meta.token_slices.values import SlicingError

BLOCK = 3
SEGMENTS = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0] * 7 + [1] * 5])


def causal(rows, keys):
    return rows[:, None] >= keys


def same(rows, keys):
    return rows[:, :, None] == keys[:, None, :]


def blocks_of(value, size):
    return jnp.moveaxis(value.reshape(len(value), -1, size, *value.shape[2:]), 1, 0)


def attend(queries, rows, segments, keys, block, seen=causal, alike=same, constant=-1e30):
    """Attend by blocks of keys with a running softmax."""
    numbers = jnp.arange(TOKENS // block)
    *keys, of_keys = (blocks_of(one, block) for one in keys)

    @jax.checkpoint
    def advance(state, given):
        (m, l, out), (number, k, v, of_keys) = state, given
        scores = jnp.einsum("btd,bsd->bts", queries, k)
        hidden = seen(rows, number * block + jnp.arange(block)) & alike(segments, of_keys)
        scores = jnp.where(hidden, scores, constant)
        most = jnp.maximum(m, scores.max(-1))
        p, kept = jnp.exp(scores - most[..., None]), jnp.exp(m - most)
        made = out * kept[..., None] + jnp.einsum("bts,bsd->btd", p, v)
        return (most, l * kept + p.sum(-1), made), None

    shape = queries.shape[:2]
    start = jnp.full(shape, constant), jnp.zeros(shape), jnp.zeros_like(queries)
    (_, l, out), _ = lax.scan(advance, start, (numbers, *keys, of_keys))
    return out / l[..., None]


def dense(queries, rows, segments, keys, _, seen=causal, alike=same, constant=-1e30):
    """Attend to all keys at once."""
    keys, values, of_keys = keys
    scores = jnp.einsum("btd,bsd->bts", queries, keys)
    hidden = seen(rows, jnp.arange(TOKENS)) & alike(segments, of_keys)
    return jax.nn.softmax(jnp.where(hidden, scores, constant)) @ values


def by_queries(attend, size):
    """One block of queries after another."""

    def mixed(queries, rows, segments, *others, **options):
        parts = rows.reshape(-1, size), blocks_of(queries, size), blocks_of(segments, size)
        found = lax.map(lambda one: attend(one[1], one[0], one[2], *others, **options), parts)
        return jnp.moveaxis(found, 0, 1).reshape(queries.shape)

    return mixed


def step(attend, of_queries=lambda segments: segments, block=BLOCK, **options) -> tuple[Any, Any]:
    _, (weights, x) = step_of(lambda weights, x: x)

    def step(weights, batch):
        x, segments = batch

        def loss(weights):
            queries, keys = x @ weights["q"], x @ weights["k"]
            rows, of_rows = jnp.arange(TOKENS), of_queries(segments)
            keys = keys, x @ weights["v"], segments
            found = attend(queries, rows, of_rows, keys, block, **options)
            return jnp.mean(jnp.tanh(found) ** 2)

        return jax.value_and_grad(loss)(weights)

    return step, (weights, (x, SEGMENTS))


LOOPS = {
    "blocks of keys": attend,
    "larger blocks of queries": by_queries(attend, 2 * BLOCK),
    "blocks of queries": by_queries(dense, BLOCK),
    "both": by_queries(attend, BLOCK),
}


@pytest.mark.sample(loop=2)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_documents_in_blocks(loop):
    check(*step(loop), (6, 6))


def test_documents_in_uneven_slices_under_an_infinite_mask():
    def seen(rows, keys):
        return causal(rows, keys) & (rows[:, None] - keys < 5)

    check(*step(by_queries(attend, BLOCK), seen=seen, constant=-jnp.inf), (3, 6, 3))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_documents_in_microbatches(loop):
    """A mask constant of all sequences is read at the number of the microbatch."""
    microbatch = Step(*step(loop), batch_argnums=(1,)).program(2)
    assert cut(microbatch, (6, 6)).slices.lengths == (6, 6)


ELSEWHERE = {
    "shifted": lambda segments: jnp.roll(segments, 1, 1),
    "in reverse": lambda segments: segments[:, ::-1],
    "blocks in reverse": lambda s: s.reshape(2, -1, BLOCK)[:, ::-1].reshape(2, TOKENS),
    "within for without": lambda s: s.reshape(2, BLOCK, -1).mT.reshape(2, TOKENS),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.parametrize("of_queries", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_documents_of_other_tokens_may_leave_none(loop, of_queries):
    with pytest.raises(SlicingError, match="all of whose keys are masked cannot be excluded"):
        cut(program(*step(loop, of_queries)), (6, 6))


def test_other_documents_may_leave_none():
    with pytest.raises(SlicingError, match="all of whose keys are masked cannot be excluded"):
        cut(program(*step(attend, alike=lambda rows, keys: ~same(rows, keys))), (6, 6))


def later(rows, keys):
    return rows[:, None] <= keys


def one_more(rows, keys):
    return rows[:, None] + 1 >= keys


@pytest.mark.parametrize("seen", [later, one_more, lambda rows, keys: True])
@pytest.mark.parametrize("loop", [attend, by_queries(attend, BLOCK)])
def test_documents_that_look_ahead_are_refused(loop, seen):
    with pytest.raises(SlicingError, match="which no mask was proved to leave out"):
        cut(program(*step(loop, seen=seen)), (6, 6))
