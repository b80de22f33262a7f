import jax
import jax.numpy as jnp
import pytest
from jax import lax

X = jax.random.normal(jax.random.key(0), (8, 4, 4))


@pytest.mark.parametrize("function", [jnp.sum, jnp.max, jnp.min, jnp.prod])
def test_partial_results_combine_over_any_dims(check, function):
    check(lambda x: function(x, axis=(0, 2)), (X,), count=6)


def test_flags_combine_by_and_and_or(check):
    check(lambda x: (jnp.any(x > 1, axis=0), jnp.all(x > -2, axis=(0, 1))), (X,), count=5)


def test_the_place_of_the_best_is_found_across_shards_and_ties_go_to_the_first(check):
    whole = jnp.round(X)
    check(
        lambda x: (lax.argmax(x, 0, jnp.int32), lax.argmin(x, 2, jnp.int32)),
        (whole,),
        count=8,
    )


def test_bitwise_and_custom_reductions_keep_the_reduced_dims_whole(check):
    bits = (X * 100).astype(jnp.int32)
    check(lambda b: lax.reduce_xor(b, (0,)), (bits,), count=4)
    check(
        lambda x: lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        (X,),
        count=4,
    )
