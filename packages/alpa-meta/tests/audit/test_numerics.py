"""Differences in ulps, and how many a step may show."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.audit.numerics import difference_in_ulps, sensitivity, single_device_reference


def test_neighbouring_floats_are_one_ulp_apart():
    one = np.array([1.0, 0.25], np.float32)
    assert difference_in_ulps(np.nextafter(one, np.float32(2)), one) == 1.0
    assert difference_in_ulps(one, one) == 0.0


def test_an_ulp_is_that_of_the_leaf_s_largest_magnitude():
    expected = np.array([1024.0, 1e-3], np.float32)
    actual = np.array([1024.0, 1e-3 + 2**-13], np.float32)
    assert difference_in_ulps(actual, expected) == pytest.approx(1.0, rel=1e-3)


def test_bfloat16_has_its_own_ulp():
    expected = jnp.array([1.0], jnp.bfloat16)
    assert difference_in_ulps(expected + jnp.bfloat16(2**-7), expected) == 1.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (np.array([1], np.int32), np.array([2], np.int32)),
        (np.array([np.nan], np.float32), np.array([1], np.float32)),
        (np.array([1], np.float32), np.array([np.inf], np.float32)),
        (np.array([1e-30], np.float32), np.array([0], np.float32)),
    ],
)
def test_what_must_be_equal_and_is_not_is_infinitely_far(actual, expected):
    assert difference_in_ulps(actual, expected) == float("inf")


def test_equal_nans_infinities_keys_and_empty_leaves_are_no_difference():
    odd = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert difference_in_ulps(odd, odd) == 0.0
    assert difference_in_ulps(jax.random.key(3), jax.random.key(3)) == 0.0
    assert difference_in_ulps(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0


def test_other_shapes_or_trees_are_refused():
    with pytest.raises(ValueError, match=r"one shape and dtype, got \(2,\) float32"):
        difference_in_ulps(np.zeros(2, np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="trees of one structure"):
        single_device_reference(lambda x: {"b": x}, (jnp.ones(2),), jax.random.key(0)).check(
            {"a": 1.0}
        )


def test_a_step_that_amplifies_rounding_is_allowed_more():
    x = jnp.linspace(1.0, 2.0, 64)
    smooth = sensitivity(lambda x: {"y": 2 * x}, (x,), jax.random.key(0))["['y']"]
    rough = sensitivity(lambda x: {"y": (x - 1.5) * 1e6 % 1}, (x,), jax.random.key(0))["['y']"]
    assert smooth <= 4 < 1000 < rough


def test_a_reordered_sum_agrees_and_a_missing_term_differs():
    x = jax.random.normal(jax.random.key(0), (4096,))

    def step(x):
        return {"sum": jnp.sum(x * x)}

    good = {"sum": jnp.sum(jnp.sum((x * x).reshape(8, -1), axis=1))}
    bad = {"sum": jnp.sum((x * x)[:-8])}
    assert single_device_reference(step, (x,), jax.random.key(1)).check(good).ok
    check = single_device_reference(step, (x,), jax.random.key(1)).check(bad)
    assert not check.ok and "DIFFERS from one device in 0 of 1 leaves" in check.text()


def _noise(x):
    """The gradient of a bias before a normalisation, and its square: zero but for rounding."""

    def loss(bias, x):
        values = x + bias
        centred = values - values.mean(0)
        return jnp.sum(jnp.sin(jnp.arange(4096.0))[:, None] * centred / jnp.std(values, 0))

    gradient = jax.grad(loss)(jnp.zeros(4), x)
    return {"gradient": gradient, "moment": gradient**2, "mean": x.mean(0)}


def test_a_result_that_is_nothing_but_rounding_may_be_other_rounding():
    # a draw whose noise moves by more than its own size, in whatever order sums are compiled: by
    # 2.8 and 4.3 times for two code generators, its square by 1.1 and 2.7
    x = 3.0 + jax.random.normal(jax.random.key(3), (4096, 4))
    expected = _noise(x)
    scale = float(jnp.abs(expected["gradient"]).max())
    other = 10 * scale * jnp.ones(4)
    found = {**expected, "gradient": other, "moment": other**2}
    assert single_device_reference(_noise, (x,), jax.random.key(1)).check(found).ok
    wrong = {**expected, "gradient": jnp.full(4, 0.1), "moment": jnp.full(4, 0.01)}
    assert not single_device_reference(_noise, (x,), jax.random.key(1)).check(wrong).ok


def test_complex_parameters_are_rounded_otherwise_too():
    x = jnp.exp(1j * jnp.linspace(0.0, 6.0, 64))
    step = jax.jit(lambda x: {"sum": (x**3).sum()})
    assert 0 < sensitivity(step, (x,), jax.random.key(0))["['sum']"] < 1e3
