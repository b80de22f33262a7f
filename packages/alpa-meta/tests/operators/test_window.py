import jax
import jax.numpy as jnp
import pytest
from jax import lax

X = jax.random.normal(jax.random.key(0), (2, 8, 8, 4))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("operation", "start"), [(lax.max, -jnp.inf), (lax.add, 0.0), (lax.min, jnp.inf)]
)
def test_pooling_exchanges_the_edges_of_overlapping_windows(check, operation, start, size):
    def function(x):
        return lax.reduce_window(x, start, operation, (1, size, size, 1), (1, 2, 2, 1), "SAME")

    done = check(function, (X,), count=6)
    assert sum(done.values()) >= 6


def test_gradients_of_pooling_stay_within_windows_apart(check):
    def loss(x):
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return (pooled**2).sum()

    done = check(jax.grad(loss), (X,), only="select_and_scatter_add", count=5)
    assert done["select_and_scatter_add"]
    tangent = lambda x: jax.jvp(loss, (x,), (x,))[1]  # noqa: E731
    done = check(tangent, (X,), only="select_and_gather_add", count=4)
    assert done["select_and_gather_add"]
