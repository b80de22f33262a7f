"""Collectives over the axis of a former pmap are what they are for one member."""

import warnings
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_meta as alpa
from alpa_meta.step.trace import trace

X = jnp.arange(12.0).reshape(3, 4) + 1
PAIRS = [[0, 1], [2, 3]]

pytestmark = pytest.mark.filterwarnings("ignore:the step communicates over")


def _run(function):
    program, _ = trace(function, X)
    assert not program.effects
    return jax.jit(jax.extend.core.jaxpr_as_fun(program))(X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.pmean({"a": x, "b": 2 * x}, "i"),
        lambda x: x * (lax.axis_index("i") + lax.psum(1, "i")),
        lambda x: lax.all_gather(x, "i", axis=1),
        lambda x: lax.all_gather(x, "i", tiled=True),
        lambda x: lax.psum_scatter(x[None], "i"),
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        lambda x: lax.all_to_all(x[:, None], "i", 1, 0),
        lambda x: lax.ppermute(x, "i", [(0, 0)]),
        lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(lax.pmean(x, "i"))))(x),
        lambda x: jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(lax.pmean(x, "i")))))(x),
        lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.pmax(x, "i"), lambda x: x + 1, x),
        lambda x: lax.while_loop(
            lambda carry: lax.psum(carry[0], "i") < 3,
            lambda carry: (carry[0] + 1, lax.pmin(carry[1], "i") * 2),
            (0, x),
        ),
        lambda x: [jax.jit(lambda x: lax.psum(x, "i") * 2)(one) for one in (x, x + 1)],
    ],
)
def test_a_member_alone_finds_what_a_pmap_over_one_device_finds(function):
    found = _run(function)
    expected = jax.pmap(function, axis_name="i", devices=jax.devices()[:1])(X[None])
    for one, other in zip(found, jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape[1:]
        np.testing.assert_allclose(one, other[0], rtol=1e-6)


def test_all_members_of_a_group_have_the_same_value():
    (mean,) = _run(lambda x: lax.pmean(x, "i", axis_index_groups=PAIRS))
    (total,) = _run(lambda x: lax.psum(x, "i", axis_index_groups=PAIRS))
    (stacked,) = _run(lambda x: lax.all_gather(x, "i", axis_index_groups=PAIRS))
    (joined,) = _run(lambda x: lax.all_gather(x, "i", axis_index_groups=PAIRS, tiled=True))
    assert np.array_equal(mean, X)
    assert np.array_equal(total, 2 * X)
    assert np.array_equal(stacked, np.stack([X, X]))
    assert np.array_equal(joined, np.concatenate([X, X]))


def test_a_mean_over_a_dim_of_vmap_and_a_former_axis_is_over_the_dim():
    (found,) = _run(jax.vmap(lambda x: lax.pmean(x, ("row", "i")), axis_name="row"))
    np.testing.assert_allclose(found, jnp.broadcast_to(X.mean(0), X.shape), rtol=1e-6)


def test_exchanges_inside_groups_are_refused():
    with pytest.raises(alpa.PlanError, match="former axis 'i' of a pmap"):
        _run(lambda x: lax.psum_scatter(x[:2], "i", axis_index_groups=PAIRS, tiled=True))


def test_a_step_of_a_former_pmap_runs_as_it_is_and_says_what_was_left_out():
    def step(weights, x, mean=lambda value: value):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(weights)
        return weights - 0.1 * mean(gradient), mean(loss)

    def parallel(weights, x):
        return step(weights, x, lambda value: lax.pmean(value, "devices"))

    weights, x = jnp.eye(8) / 2, jax.random.normal(jax.random.key(0), (16, 8))
    expected = jax.jit(step)(weights, x)
    options: dict[str, Any] = {
        "cluster": "host:8",
        "num_stages": 1,
        "num_microbatches": 2,
        "donate": False,
    }
    with pytest.warns(UserWarning, match="'devices', an axis of a former pmap"):
        found = alpa.parallelize(parallel, **options)(weights, x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_other_name_errors_pass():
    with warnings.catch_warnings(), pytest.raises(NameError, match="undefined_name"):
        warnings.simplefilter("error")
        trace(lambda x: x + undefined_name, X)  # type: ignore[name-defined]  # noqa: F821
