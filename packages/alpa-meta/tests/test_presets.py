"""Presets are the layouts people write by hand."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import PartitionSpec as P

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.corpus import build
from alpa_meta.errors import PlanError
from alpa_meta.options import Options
from alpa_meta.pinning import Pin
from alpa_meta.presets import PRESETS, preset_pins, preset_specs
from alpa_meta.step.program import Step

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
    with pytest.raises(PlanError, match="no preset 'tensor'"):
        Options(preset="tensor")


def logical_mesh(*sizes):
    return LogicalMesh(
        axes=tuple(MeshAxis(name=name, size=size) for name, size in zip("xyz", sizes))
    )


@pytest.fixture(scope="module")
def gpt():
    model = build("gpt")
    return Step(model.train_step, (model.state, model.batch)).program(1)


def pins_by_path(name, program, mesh):
    pins = preset_pins(name, program, mesh)
    return {
        leaf.path: pins[var].dims
        for var, leaf in zip(program.jaxpr.invars, program.inputs)
        if var in pins
    }


def test_a_preset_pins_every_input_of_a_step_as_its_specs_say(gpt):
    pins = pins_by_path("megatron", gpt, logical_mesh(2, 4))
    assert pins["state['params']['block_0']['down']['kernel']"] == (("y",), ())
    assert pins["batch['tokens']"] == (("x",), ())
    assert len(pins) == len(gpt.inputs)


def test_on_one_axis_megatron_leaves_the_batch_whole_and_sequences_are_cut_over_it(gpt):
    mesh = logical_mesh(4)
    assert pins_by_path("megatron", gpt, mesh)["batch['tokens']"] == ((), ())
    tensor, sequence = (preset_pins(name, gpt, mesh) for name in ("megatron", "megatron-sp"))
    added = [pin for var, pin in sequence.items() if var not in tensor]
    assert set(added) == {Pin(((), ("x",), ()))}
    assert len(added) >= 4  # two residual sums in each of two blocks


def test_zero2_keeps_parameters_whole_under_the_step_s_own_paths(gpt):
    pins = pins_by_path("zero2", gpt, logical_mesh(8))
    assert pins["state['params']['block_0']['up']['kernel']"] == ((), ())
    cut = [path for path, dims in pins.items() if "block_0" in path and any(dims)]
    assert cut and all("opt_state" in path for path in cut)
