"""Mamba-2's state space duality: attention inside chunks of tokens, decays from chunk to chunk."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from sliced_steps import CAUSAL, TOKENS, attention, check, cut, program, step_of

from alpa_meta.token_slices.values import SlicingError

CHUNK = 3


def lower(size, offset=0):
    return jnp.tril(jnp.ones((size, size), bool), offset)


def difference(x, offset=0):
    """Return [..., i, j] the sums of x over j + 1..i, -inf for j > i + `offset`."""
    sums = jnp.cumsum(x, -1)
    return jnp.where(lower(x.shape[-1], offset), sums[..., None] - sums[..., None, :], -jnp.inf)


def stable(x):
    """Return `difference`, without subtracting large sums."""
    size = x.shape[-1]
    kept = jnp.where(lower(size, -1), jnp.broadcast_to(x[..., None], (*x.shape, size)), 0)
    return jnp.where(lower(size), jnp.cumsum(kept, -2), -jnp.inf)


def dual(sums):
    """Return the layer as its authors write it (`ssd_minimal_discrete`)."""

    def mixed(weights, x):
        shape = len(x), TOKENS // CHUNK, CHUNK
        decay = -jax.nn.softplus(x @ weights["w"]).reshape(shape)
        queries, keys, values = (
            one.reshape(*shape, -1) for one in (x @ weights["q"], x @ weights["k"], x)
        )
        inside = jnp.exp(stable(decay))
        diagonal = jnp.einsum("bcln,bcsn,bcls,bcsp->bclp", queries, keys, inside, values)
        ends = jnp.cumsum(decay, -1)
        states = jnp.einsum("bcln,bcl,bclp->bcpn", keys, jnp.exp(ends[..., -1:] - ends), values)
        states = jnp.concatenate([jnp.zeros_like(states[:, :1]), states], 1)
        between = jnp.exp(sums(jnp.pad(ends[..., -1], ((0, 0), (1, 0)))))
        states = jnp.einsum("bzc,bcpn->bzpn", between, states)[:, :-1]
        return (
            diagonal + jnp.einsum("bcln,bcpn,bcl->bclp", queries, states, jnp.exp(ends))
        ).reshape(x.shape)

    return mixed


def by_scan(reverse=False, attend=False):
    """Linear attention inside chunks to their tokens up to each, and by a scan to those before;
    then attention to all tokens up to each."""

    def mixed(weights, x):
        shape = len(x), TOKENS // CHUNK, CHUNK
        queries, keys, values = (
            one.reshape(*shape, -1) for one in (x @ weights["q"], x @ weights["k"], x)
        )
        inside = jnp.tril(jnp.einsum("bctn,bcsn->bcts", queries, keys))
        states = jnp.einsum("bcsn,bcsp->cbnp", keys, values)
        start = jnp.zeros(states.shape[1:])
        _, before = lax.scan(lambda s, one: (jnp.tanh(s) + one, s), start, states, reverse=reverse)
        found = jnp.einsum("bcts,bcsp->bctp", inside, values)
        found = (found + jnp.einsum("bctn,cbnp->bctp", queries, before)).reshape(x.shape)
        if attend:
            attention_of = attention(lambda s, _: jax.nn.softmax(jnp.where(CAUSAL, s, -1e30)))
            found = attention_of(weights, jnp.tanh(found))
        return found

    return mixed


def layers(mixed):
    return lambda weights, x: lax.scan(lambda x, _: (x + mixed(weights, x), None), x, length=2)[0]


@pytest.mark.sample(mixed=2)
@pytest.mark.parametrize("mixed", [dual(difference), dual(stable), layers(dual(difference))])
def test_chunks_that_decay_into_later_ones_run_in_slices_of_whole_chunks(mixed):
    check(*step_of(mixed), (3, 9))


@pytest.mark.parametrize("attend", [False, True])
def test_chunks_that_the_backward_pass_recomputes_run_in_slices_of_whole_chunks(attend):
    mixed = by_scan(attend=attend)
    check(*step_of(lambda weights, x: jax.checkpoint(mixed)(weights, x)), (3, 6, 3))


def test_recomputed_chunks_that_later_ones_reach_are_refused():
    mixed = by_scan(reverse=True)
    step, args = step_of(lambda weights, x: jax.checkpoint(mixed)(weights, x))
    with pytest.raises(SlicingError, match="runs from the last token to the first"):
        cut(program(step, args), (3, 9))


def test_chunks_that_decay_into_earlier_ones_are_refused():
    step, args = step_of(dual(lambda x: difference(x, 1)))
    with pytest.raises(SlicingError, match="no mask was proved to leave out"):
        cut(program(step, args), (3, 9))


def test_a_running_sum_goes_on_from_slice_to_slice_where_its_last_state_is_read_too():
    def layer(weights, x):
        def advance(total, one):
            total = total + one
            return total, jnp.tanh(total)

        last, found = lax.scan(
            advance, jnp.zeros(x.shape[::2]), jnp.moveaxis(x @ weights["q"], 1, 0)
        )
        return x + jnp.moveaxis(found, 0, 1), last

    def step(weights, x):
        def loss(weights):
            y, last = lax.scan(lambda x, _: layer(weights, x), x @ weights["v"], length=2)
            return jnp.mean(y**2) + jnp.mean(last**2)

        return jax.value_and_grad(loss)(weights)

    check(step, step_of(None)[1], (5, 7))
