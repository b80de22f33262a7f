import jax
import jax.numpy as jnp
from jax import lax

A = jax.random.normal(jax.random.key(0), (4, 4, 4))
SPD = A @ jnp.swapaxes(A, 1, 2) + 4 * jnp.eye(4)


def test_matrices_of_a_batch_are_independent(check):
    def function(a):
        return (
            jnp.linalg.cholesky(a),
            lax.linalg.lu(a),
            jnp.linalg.eigvalsh(a),
            jnp.linalg.qr(a, mode="r"),
            jnp.linalg.svd(a, compute_uv=False),
        )

    done = check(function, (SPD,), mesh_shape=(2, 2), count=2, tolerance=1e-4)
    assert {"cholesky", "lu", "eigh", "svd"} <= set(done)


def test_right_hand_sides_are_independent(check):
    def function(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    check(function, (SPD, A), count=4, tolerance=1e-4)
    check(
        lambda a, b: lax.linalg.triangular_solve(a, b, lower=True),
        (SPD, A),
        count=4,
        tolerance=1e-4,
    )


def test_transforms_are_sharded_by_the_other_dims(check):
    check(lambda a: jnp.fft.fft2(a), (A,), count=3)
    check(lambda a: jnp.fft.irfft(jnp.fft.rfft(a)), (A,), only="fft", count=3)
