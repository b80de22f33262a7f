import jax
import jax.numpy as jnp
import pytest
from jax import lax

X = jax.random.normal(jax.random.key(0), (8, 4))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "function", [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]
)
def test_running_results_join_the_totals_of_earlier_shards(check, function, reverse):
    check(lambda x: function(x, axis=0, reverse=reverse), (X,), count=5, mesh_shape=(4, 2))


def test_running_counts_are_exact(check):
    check(lambda x: lax.cumsum(x, axis=0), ((X * 10).astype(jnp.int32),), count=5)


def test_sorting_and_the_largest_few_are_sharded_by_rows(check):
    check(lambda x: lax.sort((x, -x), dimension=1, num_keys=1), (X,), count=4)
    check(lambda x: lax.top_k(x, 2), (X,), count=4)
    check(lambda x: lax.approx_max_k(x, 2), (X,), count=4)
