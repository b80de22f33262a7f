"""Models are found by name, and the name they carry is the one they were asked by."""

from __future__ import annotations

import jax
import pytest

from alpa_meta.corpus import NAMES, build

QUICK = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "equinox-mlp"])
def test_a_model_carries_the_name_it_was_built_by(name):
    assert build(name).name == name


def test_an_unknown_name_is_refused_with_the_list_of_names():
    with pytest.raises(ValueError, match=r"no model 'gtp'; it has convnet, .*wide-resnet"):
        build("gtp")


def test_an_unknown_size_is_refused_with_the_sizes():
    with pytest.raises(ValueError, match="must be one of tiny, small, large, got 'huge'"):
        build("gpt", "huge")


def test_the_three_tied_gpts_are_one_function_of_the_same_numbers():
    batch = build("gpt-tied").make_batch(jax.random.key(1))
    losses = []
    for name in ("gpt-tied", "gpt-remat", "gpt-scan"):
        model = build(name)
        state = jax.jit(model.make_state, compiler_options=QUICK)(jax.random.key(0))
        losses.append(
            float(jax.jit(model.train_step, compiler_options=QUICK)(state, batch)[1]["loss"])
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
