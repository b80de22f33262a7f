"""Presets are the layouts people write by hand."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import PartitionSpec as P

from alpa_meta.corpus import build
from alpa_meta.errors import PlanError
from alpa_meta.presets import PRESETS, preset_specs

MESH = {"data": 2, "model": 4}


def is_spec(leaf):
    return isinstance(leaf, P)


def specs(preset, model="gpt-tied"):
    one = build(model)
    return preset_specs(preset, one.state, one.batch, MESH)


def test_data_parallelism_cuts_the_batch_only():
    state, batch = specs("dp")
    assert set(jax.tree.leaves(state, is_leaf=is_spec)) <= {P(*[None] * dims) for dims in range(5)}
    assert batch == {"tokens": P(("data", "model")), "labels": P(("data", "model"))}


def test_zero2_cuts_optimiser_state_and_zero3_the_parameters_too():
    state, _ = specs("zero2")
    assert state["params"]["embed"] == P(None, None)
    assert state["opt_state"][0].mu["embed"] == P(("data", "model"), None)
    state, _ = specs("zero3")
    assert state["params"]["embed"] == P(("data", "model"), None)
    assert specs("fsdp") == specs("zero3")


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("qkv", P(None, None, ("model",), None)),
        ("out", P(("model",), None, None)),
        ("up", P(None, ("model",))),
        ("up_bias", P(("model",))),
        ("down", P(("model",), None)),
        ("down_bias", P(None)),
    ],
)
def test_megatron_cuts_columns_then_rows(name, spec):
    state, batch = specs("megatron")
    assert state["params"]["layers"][0][name] == spec
    assert state["opt_state"][0].nu["layers"][0][name] == spec
    assert state["params"]["embed"] == P(("model",), None)
    assert batch["tokens"] == P(("data",))


def test_megatron_reads_flax_names():
    block = specs("megatron", "gpt")[0]["params"]["block_0"]
    assert block["attention"]["query"]["kernel"] == P(None, ("model",), None)
    assert block["attention"]["query"]["bias"] == P(("model",), None)
    assert block["attention"]["out"]["kernel"] == P(("model",), None, None)
    assert block["down"]["kernel"] == P(("model",), None)


def test_two_dimensional_sharding_cuts_what_megatron_leaves_whole():
    layer = specs("2d")[0]["params"]["layers"][0]
    assert layer["up"] == P(("data",), ("model",))
    assert layer["norm_1"]["scale"] == P(("data",))


def test_expert_parallelism_cuts_experts():
    layer = specs("expert", "moe-einsum")[0]["params"]["layers"][0]
    assert layer["up"] == layer["down"] == P(("model",), None, None)
    assert layer["router"] == P(None, None)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("model", ["vit", "wide-resnet", "dlrm", "mamba"])
def test_every_preset_divides_every_model(preset, model):
    one = build(model)
    state, _ = preset_specs(preset, one.state, one.batch, MESH)
    for leaf, spec in zip(jax.tree.leaves(one.state), jax.tree.leaves(state, is_leaf=is_spec)):
        for size, axes in zip(leaf.shape, spec):
            named = (axes,) if isinstance(axes, str) else axes or ()
            assert size % math.prod(MESH[axis] for axis in named) == 0


def test_an_unknown_preset_is_refused():
    with pytest.raises(PlanError, match="no preset 'tensor'; there are 2d, dp"):
        specs("tensor")
