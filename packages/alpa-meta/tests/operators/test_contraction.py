import jax
import jax.numpy as jnp
import pytest
from jax import lax

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("subscripts", "left", "right"),
    [
        ("mk,kn->mn", (8, 4), (4, 8)),
        ("bqhd,bkhd->bhqk", (4, 8, 2, 4), (4, 8, 2, 4)),
        ("abij,abjk->abik", (2, 4, 4, 8), (2, 4, 8, 4)),
        ("abc,abc->", (4, 2, 8), (4, 2, 8)),
        ("m,n->mn", (8,), (4,)),
    ],
)
def test_products_sum_over_any_shared_dims(check, subscripts, left, right):
    a, b = jax.random.normal(KEY, left), jax.random.normal(KEY, right)
    function = lambda a, b: jnp.einsum(subscripts, a, b)  # noqa: E731
    done = check(function, (a, b), only="dot_general", count=4, mesh_shape=(2, 4))
    assert done["dot_general"]


def test_grouped_products_count_their_own_rows(check):
    sizes = jnp.array([3, 0, 6, 4], jnp.int32)
    rows = jax.random.normal(KEY, (16, 8))  # three rows belong to no group
    weights = jax.random.normal(KEY, (4, 8, 4))

    def function(rows, weights):
        return lax.ragged_dot(rows, weights, sizes)

    check(function, (rows, weights), only="ragged_dot_general", count=12)
    gradient = jax.grad(lambda w: (function(rows, w) ** 2).sum())
    check(gradient, (weights,), only="ragged_dot_general", count=8)
