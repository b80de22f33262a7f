import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_meta.trainer.model import Gpt, GptOptions, attention_bias

SMALL = GptOptions(num_layers=2, hidden=16, num_heads=2, context=8)


def _logits(options, tokens):
    gpt = Gpt(options)
    params = jax.jit(gpt.init)(jax.random.key(0), tokens)
    return jax.jit(gpt.apply)(params, tokens)


def test_a_prediction_does_not_depend_on_later_bytes():
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 256)
    changed = tokens.at[:, 5:].set(0)
    before, after = _logits(SMALL, tokens), _logits(SMALL, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_logits_are_float32_whatever_the_arithmetic():
    tokens = jnp.zeros((1, 8), jnp.int32)
    for dtype in ("float32", "bfloat16"):
        options = GptOptions(num_layers=1, hidden=16, num_heads=2, context=8, dtype=dtype)
        logits = _logits(options, tokens)
        assert logits.dtype == jnp.float32
        assert logits.shape == (1, 8, 256)


def test_attention_bias_falls_with_distance_by_the_slope_of_the_head():
    bias = np.asarray(attention_bias(2, 3))
    np.testing.assert_allclose(bias[0, 2], [-2.0, -1.0, 0.0])
    np.testing.assert_allclose(bias[1, 2], [-2 / 16, -1 / 16, 0.0])
    assert bias[0, 0, 1] < -1e8


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="divisible by num_heads"):
        GptOptions(hidden=10, num_heads=4)
