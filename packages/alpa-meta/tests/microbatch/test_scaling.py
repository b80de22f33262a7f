"""How values scale with the batch, found from two traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_meta.compat import Literal, open_jaxpr
from alpa_meta.microbatch.scaling import CONSTANT, MIXED, Scaling, batch_scaling
from alpa_meta.step.trace import trace

WEIGHT = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def place(x):
    """Return a place from 0 to 1 for each example."""
    return (x[:, 0] > 0).astype(jnp.int32)


def _written(x):
    return lax.fori_loop(0, 3, lambda k, y: y.at[:, k].set(2 * x[:, k]), jnp.zeros_like(x))


def _solved(w, rhs):
    matrix = jnp.tril(w[:, :3]) + 2 * jnp.eye(3)
    return lax.linalg.triangular_solve(
        matrix, rhs[..., None] if rhs.ndim == 1 else rhs, left_side=True, lower=True
    )


def result_scaling(function, *, size=2):
    """Return the scaling of function(weight [3, 4], x [batch, 3])."""

    def traced(batch):
        return trace(function, WEIGHT, jax.ShapeDtypeStruct((batch, 3), jnp.float32))[0]

    small = traced(size)
    known = batch_scaling(small, traced(2 * size), [CONSTANT, Scaling("example", 0, 0)])
    (result,) = open_jaxpr(small).outvars
    return CONSTANT if isinstance(result, Literal) else known[result]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w, x: (x @ w).sum(), Scaling("reduced", 0)),
        (lambda w, x: (x @ w).sum(0), Scaling("reduced", 0)),
        (lambda w, x: (x @ w).mean(), Scaling("reduced", -1)),
        (lambda w, x: 3 * (x @ w).mean() - x.mean(), Scaling("reduced", -1)),
        (lambda w, x: (x @ w).mean() * w.sum(), Scaling("reduced", -1)),
        (lambda w, x: (x @ w).mean() + w.sum(), Scaling("reduced", -1)),
        (lambda w, x: x @ w, Scaling("example", 0, 0)),
        (lambda w, x: (x @ w).T, Scaling("example", 0, 1)),
        (lambda w, x: (x @ w).max(1), Scaling("example", 0, 0)),
        (lambda w, x: w * 2, Scaling("constant")),
        (lambda w, x: w.sum() * x.shape[0], Scaling("constant", 1)),
        (lambda w, x: x.max(), Scaling("extreme", reduction="max")),
        (lambda w, x: x.min(0)[None], Scaling("extreme", reduction="min")),
        (lambda w, x: (x > 0).any(), Scaling("extreme", reduction="max")),
        (lambda w, x: (x > 0).all(), Scaling("extreme", reduction="min")),
        (lambda w, x: jnp.sum(x > 0), Scaling("reduced", 0)),
        (lambda w, x: jnp.fft.fft(x / x.shape[0]).real.sum(), Scaling("reduced", -1)),
        (lambda w, x: jnp.tile(x / x.shape[0], (1, 2)).sum(), Scaling("reduced", -1)),
        (lambda w, x: jnp.zeros(3).at[place(x)].add(x[:, 0]), Scaling("reduced", 0)),
        (lambda w, x: w[0].at[place(x)].max(x[:, 0]), Scaling("extreme", reduction="max")),
        (lambda w, x: x.max().astype(jnp.int32), Scaling("extreme", reduction="max")),
        (lambda w, x: w.sum() * jnp.asarray(np.arange(3.0)).sum(), Scaling("constant")),
        (lambda w, x: jnp.pad(x * (1 + 1j), ((0, 0), (1, 2))), Scaling("example", 0, 0)),
        (lambda w, x: (x * (1 + 1j)).mean(), Scaling("reduced", -1)),
        (lambda w, x: sum(jnp.unstack(x / x.shape[0], axis=1)), Scaling("example", -1, 0)),
        (lambda w, x: sum(jnp.unstack(x.mean(0))), Scaling("reduced", -1)),
        (lambda w, x: jnp.stack([x, x], 1) / x.shape[0], Scaling("example", -1, 0)),
        (lambda w, x: (x / x.shape[0]).at[:, 1].set(0.0).sum(), Scaling("reduced", -1)),
        (lambda w, x: x.mean(0).at[1].set(0.0), Scaling("reduced", -1)),
        (lambda w, x: x.mean(0).at[1].set(1.0), MIXED),
        (lambda w, x: lax.dynamic_slice(w, (jnp.int32(x.shape[0] // 2), 0), (1, 4)), MIXED),
        (
            lambda w, x: lax.dynamic_update_slice(x, x[:, :1], (0, jnp.int32(x.shape[0] // 2))),
            MIXED,
        ),
        (lambda w, x: w[x.shape[0] // 2], MIXED),
        (lambda w, x: (x @ w) ** x.shape[0], MIXED),
        (lambda w, x: jnp.pad(x, ((0, 0), (x.shape[0], 4 - x.shape[0])))[:, :3], MIXED),
        (lambda w, x: _written(x / x.shape[0]), Scaling("example", -1, 0)),
        (lambda w, x: _solved(w, x.mean(0)), Scaling("reduced", -1)),
        (lambda w, x: _solved(w, x.T), Scaling("example", 0, 1)),
    ],
)
def test_values_get_the_form_and_the_power_of_n_they_have(function, expected):
    assert result_scaling(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x.sum() + w.sum(),
        lambda w, x: (x**2).sum() / x.sum(),
        lambda w, x: jnp.sqrt((x**2).mean()),
        lambda w, x: (x - x.mean(0)).sum(),
        lambda w, x: x.sum() + x.mean(),
        lambda w, x: x.max(0).sum(),
        lambda w, x: -x.max(),
        lambda w, x: jnp.sort(x, axis=0)[0, 0],
        lambda w, x: jnp.cumsum(x, axis=0),
        lambda w, x: x * jnp.arange(x.shape[0])[:, None],
        lambda w, x: jax.random.normal(jax.random.key(0), x.shape),
        lambda w, x: x[::-1][0],
        lambda w, x: (x * x.shape[0] ** 0.5).sum(),
        # examples picked by their place in the batch
        lambda w, x: lax.dynamic_index_in_dim(x, 0),
        lambda w, x: lax.dynamic_update_slice(x, jnp.zeros((1, 3)), (0, 0)).sum(),
        lambda w, x: x.reshape(2, -1, 3).sum(1).max(0),
        lambda w, x: jnp.broadcast_to(x[:, :1], (x.shape[0], x.shape[0])).sum(),
        # sums that begin with something, are rounded down, or say where to read
        lambda w, x: w[0].at[place(x)].add(x[:, 0]),
        lambda w, x: x.sum().astype(jnp.int32),
        lambda w, x: (x > 0).sum().astype(bool),
        lambda w, x: x.max().astype(bool),
        lambda w, x: lax.div((x > 0).sum(), 2),
        lambda w, x: lax.dynamic_slice(
            w, (jnp.sum(x > 0, dtype=jnp.uint32), jnp.uint32(0)), (1, 4)
        ),
        # made to the size of the batch
        lambda w, x: w.sum() * jnp.asarray(np.linspace(0, 1, x.shape[0])).sum(),
        lambda w, x: lax.while_loop(lambda c: c < x.shape[0], lambda c: c + 1, 0),
    ],
)
def test_what_depends_on_how_examples_are_cut_is_mixed(function):
    assert result_scaling(function) == MIXED


def test_gradients_of_a_mean_are_means_and_of_a_sum_are_sums():
    def loss(reduce):
        return lambda w, x: jax.grad(lambda w: reduce(jnp.tanh(x @ w) ** 2))(w)

    assert result_scaling(loss(jnp.mean)) == Scaling("reduced", -1)
    assert result_scaling(loss(jnp.sum)) == Scaling("reduced", 0)


def test_a_loop_over_layers_keeps_the_batch_dim():
    def function(w, x):
        square = w @ w.T
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ square), c.sum()), x, None, length=3)[0]

    assert result_scaling(function) == Scaling("example", 0, 0)


def test_a_fixed_point_iteration_keeps_the_batch_dim():
    def trips(w, x, limit):
        def body(carry):
            value, count = carry
            return jnp.tanh(value @ (w @ w.T) + x), count + 1

        return lax.while_loop(lambda c: limit(c), body, (jnp.zeros_like(x), 0))[0]

    by_count = result_scaling(lambda w, x: trips(w, x, lambda c: c[1] < 20))
    assert by_count == Scaling("example", 0, 0)
    # a microbatch may stop before another
    assert result_scaling(lambda w, x: trips(w, x, lambda c: (c[0] < 1).all())) == MIXED


def test_sums_that_turn_up_in_later_trips_are_found():
    def loop(w, x):
        def body(carry):
            first, second, third, count = carry
            return second, third, first + x.sum(), count + 1

        zero = jnp.zeros(())
        return lax.while_loop(lambda c: c[-1] < 7, body, (zero, zero, zero, 0))[0]

    assert result_scaling(loop) == Scaling("reduced", 0)
    assert result_scaling(lambda w, x: loop(w, x * loop(w, x))) == MIXED


def test_a_recomputed_block_scales_as_its_body_does():
    assert result_scaling(jax.checkpoint(lambda w, x: (x @ w).mean())) == Scaling("reduced", -1)


def test_a_branch_that_depends_on_the_data_is_mixed():
    def function(w, x):
        return jax.lax.cond(x.sum() > 0, lambda: x.sum(), lambda: 2 * x.sum())

    assert result_scaling(function) == MIXED


def test_literals_that_are_no_numbers_do_not_disturb():
    assert result_scaling(lambda w, x: jnp.where(x > 0, x, jnp.nan).sum()).form == "reduced"
    assert result_scaling(lambda w, x: jnp.where(x > 0, x, -jnp.inf).max()).form == "extreme"
