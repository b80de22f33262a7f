import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

TABLE = jax.random.normal(jax.random.key(0), (16, 8))
TOKENS = jnp.array([[0, 15, 3, 99], [7, -3, 8, 4]], jnp.int32)
ROWS = jax.random.normal(jax.random.key(1), (2, 4, 8))


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_an_embedding_is_looked_up_by_vocabulary_or_hidden(check, mode):
    tokens = jnp.abs(TOKENS) % 16 if mode == "promise_in_bounds" else TOKENS
    done = check(lambda t, i: t.at[i].get(mode=mode), (TABLE, tokens), only="gather", count=8)
    assert done["gather"] > 4


def test_a_lookup_of_integers_and_flags_is_exact(check):
    check(
        lambda t, i: t.at[i].get(mode="fill"),
        ((TABLE * 9).astype(jnp.int32), TOKENS),
        only="gather",
    )
    check(lambda t, i: t.at[i].get(mode="fill"), (TABLE > 0, TOKENS), only="gather")


def test_the_label_of_each_row_is_found_in_its_shard(check):
    labels = jnp.array([3, 0, 15, 7, 8, 1, 2, 9])[:, None]
    check(lambda x, i: jnp.take_along_axis(x, i, axis=1), (TABLE.T, labels), only="gather", count=8)


@pytest.mark.parametrize("method", ["add", "min", "max", "set", "multiply"])
def test_updates_reach_the_shard_that_holds_their_row(check, method):
    def function(t, i, u):
        return getattr(t.at[i], method)(u, mode="drop", unique_indices=method == "set")

    tokens = jnp.array([[0, 15, 3, 99], [7, -3, 8, 4]], jnp.int32)
    done = check(function, (TABLE, tokens, ROWS), count=6)
    assert sum(n for name, n in done.items() if name.startswith("scatter")) > 4


def test_clipped_updates_land_on_the_last_row(check):
    check(lambda t, i, u: t.at[i].add(u, mode="clip"), (TABLE, TOKENS, ROWS), count=6)


def test_the_gradient_of_a_batched_lookup_is_a_batched_update(check):
    index = jnp.array([[1, 0, 3], [2, 2, 0]], jnp.int32)
    table = jax.random.normal(jax.random.key(2), (2, 4, 8))
    rows = jax.vmap(lambda t, i: t[i])
    done = check(jax.grad(lambda t: (rows(t, index) ** 2).sum()), (table,), count=6)
    assert any(name.startswith("scatter") for name in done) and "gather" in done


def test_dynamic_slices_cut_whole_dims_and_single_elements(check):
    def function(x, start):
        piece = lax.dynamic_slice(x, (start, 0), (1, 8))
        block = lax.dynamic_slice(x, (start, 2), (4, 4))
        one = lax.dynamic_update_slice(x, piece * 2, (start + 1, 0))
        return piece, block, one, lax.dynamic_update_slice(x, block, (start, 3))

    check(function, (TABLE, jnp.int32(11)), count=6)
    assert np.all(np.isfinite(TABLE))
