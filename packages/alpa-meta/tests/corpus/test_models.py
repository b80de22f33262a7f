"""Every corpus model trains: same tree, finite and falling loss, on one device."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import numpy as np
import pytest

from alpa_meta.corpus import NAMES, build

QUICK = {"xla_backend_optimization_level": 0}
PARTS = ("convnet", "gpt-tied", "llama", "moe-sort", "equinox-mlp")
"""Of the models those that run by default, of layers unlike each other."""
NEEDS = {"equinox-mlp": "equinox"}


def model(name: str, size: str = "tiny"):
    needed = NEEDS.get(name)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return build(name, size)


def structure(tree):
    return jax.tree.structure(tree)


@pytest.mark.parametrize(
    "name",
    [name if name in PARTS else pytest.param(name, marks=pytest.mark.bulk) for name in NAMES],
)
def test_two_steps_on_a_fixed_batch_lower_a_finite_loss_and_keep_the_state_s_types(name):
    tiny = model(name)
    step = jax.jit(tiny.train_step, compiler_options=QUICK)
    start = jax.jit(tiny.make_state, compiler_options=QUICK)(jax.random.key(0))
    batch = tiny.make_batch(jax.random.key(1))
    first, metrics = step(start, batch)
    again = {**first, "key": start["key"]} if "key" in start else first
    second, later_metrics = step(again, batch)

    assert np.isfinite(metrics["loss"]) and np.isfinite(later_metrics["loss"])
    assert later_metrics["loss"] < metrics["loss"]
    for state in (start, second):
        assert structure(state) == structure(tiny.state)
        for leaf, described in zip(jax.tree.leaves(state), jax.tree.leaves(tiny.state)):
            assert (leaf.shape, leaf.dtype) == (described.shape, described.dtype)


@pytest.mark.sample(name=4)
@pytest.mark.parametrize("name", NAMES)
def test_small_sizes_trace_without_being_allocated(name):
    small = model(name, "small")
    _, metrics = jax.eval_shape(small.train_step, small.state, small.batch)
    assert metrics["loss"].shape == ()


@pytest.mark.sample(name=3)
@pytest.mark.parametrize("name", ["gpt-scan", "llama", "wide-resnet", "moe-sort", "t5", "unet"])
def test_large_sizes_have_more_than_a_hundred_million_parameters(name):
    params = model(name, "large").state["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 1e8
