"""Presets are the layouts people write by hand, found in the program whatever its names."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import alpa_meta as alpa
from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.corpus import build
from alpa_meta.errors import PlanError
from alpa_meta.options import Options
from alpa_meta.pinning import Pin
from alpa_meta.presets import PRESETS, Coverage, coverage, preset_pins, preset_specs
from alpa_meta.step.program import Step

MESH = {"data": 2, "model": 4}


def is_spec(leaf):
    return isinstance(leaf, P)


@functools.cache
def step_of(model):
    one = build(model)
    return Step(one.train_step, (one.state, one.batch))


def specs(preset, model="gpt-tied"):
    return preset_specs(preset, step_of(model), MESH)


def test_data_parallelism_cuts_the_batch_only():
    state, batch = specs("dp")
    assert set(jax.tree.leaves(state, is_leaf=is_spec)) <= {P(*[None] * dims) for dims in range(5)}
    cut = P(("data", "model"), None)
    assert batch == {"tokens": cut, "labels": cut}


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
    assert batch["tokens"] == P(("data",), None)


def test_megatron_cuts_heads_of_a_module_and_their_biases():
    block = specs("megatron", "gpt")[0]["params"]["block_0"]
    assert block["attention"]["query"]["kernel"] == P(None, ("model",), None)
    assert block["attention"]["query"]["bias"] == P(("model",), None)
    assert block["attention"]["out"]["kernel"] == P(("model",), None, None)
    assert block["down"]["kernel"] == P(("model",), None)


def test_layers_of_a_scan_are_cut_behind_the_dim_of_layers():
    layers = specs("megatron", "gpt-scan")[0]["params"]["layers"]
    assert layers["up"] == P(None, None, ("model",))
    assert layers["down"] == P(None, ("model",), None)


def test_two_dimensional_sharding_cuts_what_megatron_leaves_whole():
    layer = specs("2d")[0]["params"]["layers"][0]
    assert layer["up"] == P(("data",), ("model",))
    assert layer["norm_1"]["scale"] == P(("data",))


@pytest.mark.parametrize("model", ["moe-einsum", "moe-sort"])
def test_expert_parallelism_cuts_experts(model):
    layer = specs("expert", model)[0]["params"]["layers"][0]
    assert layer["up"] == layer["down"] == P(("model",), None, None)
    assert layer["router"] == P(None, None)
    assert layer["qkv"] == P(None, None, None, None)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("model", ["vit", "wide-resnet", "dlrm", "mamba"])
def test_every_preset_divides_every_model(preset, model):
    state, _ = specs(preset, model)
    given = step_of(model).args[0]
    for leaf, spec in zip(jax.tree.leaves(given), jax.tree.leaves(state, is_leaf=is_spec)):
        for size, axes in zip(leaf.shape, spec):
            named = (axes,) if isinstance(axes, str) else axes or ()
            assert size % math.prod(MESH[axis] for axis in named) == 0


def test_an_unknown_preset_is_refused():
    with pytest.raises(PlanError, match="no preset 'tensor'; there are 2d, dp"):
        specs("tensor")
    with pytest.raises(PlanError, match="no preset 'tensor'"):
        Options(preset="tensor")


# ------------------------------------------------------------------ names play no part

ROLES = ("table", "norm", "query", "key", "value", "out", "gate", "up", "down", "head")
NAMES = {
    "hugging face": "embed_tokens input_layernorm q_proj k_proj v_proj o_proj gate_proj up_proj "
    "down_proj lm_head",
    "meta": "tok_embeddings attention_norm wq wk wv wo w1 w3 w2 output",
    "flax": "embedding scale query key value out gate wi wo logits",
    "maxtext": "token_embedder pre_norm q_kernel k_kernel v_kernel o_kernel wi_0 wi_1 mlp_wo "
    "logits_dense",
    "gpt-2": "wte ln_1 attn_q attn_k attn_v c_proj c_gate c_fc mlp_c_proj zhead",
}
CUT = {
    "table": P(("model",), None),
    "norm": P(None),
    "query": P(None, ("model",)),
    "key": P(None, ("model",)),
    "value": P(None, ("model",)),
    "out": P(("model",), None),
    "gate": P(None, ("model",)),
    "up": P(None, ("model",)),
    "down": P(("model",), None),
    "head": P(None, ("model",)),
}
WIDTH, HEADS, KEYS, INNER, VOCAB, LENGTH = 64, 16, 8, 128, 256, 8


def transformer(style):
    """Return a Llama block with grouped heads under a library's names: (step, arguments)."""
    name = dict(zip(ROLES, NAMES[style].split(), strict=True))
    head = WIDTH // HEADS
    shapes = {
        "table": (VOCAB, WIDTH), "norm": (WIDTH,), "query": (WIDTH, WIDTH),
        "key": (WIDTH, KEYS * head), "value": (WIDTH, KEYS * head), "out": (WIDTH, WIDTH),
        "gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH),
        "head": (WIDTH, VOCAB),
    }  # fmt: skip
    params = {name[role]: jax.ShapeDtypeStruct(shape, "float32") for role, shape in shapes.items()}
    optimizer = optax.adamw(1e-3)

    def loss(params, batch):
        p = {role: params[name[role]] for role in ROLES}
        x = p["table"][batch["tokens"]]
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]
        q = (y @ p["query"]).reshape(*x.shape[:2], HEADS, head)
        k, v = ((y @ p[r]).reshape(*x.shape[:2], KEYS, head) for r in ("key", "value"))
        k, v = (jnp.repeat(one, HEADS // KEYS, axis=2) for one in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
        x = x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
        logits = x @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["weights"], batch)
        updates, inner = optimizer.update(grads, state["slots"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "slots": inner}, value

    tokens = jax.ShapeDtypeStruct((16, LENGTH), "int32")
    state = {"weights": params, "slots": jax.eval_shape(optimizer.init, params)}
    return name, step, (state, {"tokens": tokens, "labels": tokens})


@pytest.mark.parametrize("style", NAMES)
def test_one_model_is_cut_alike_under_the_names_of_every_library(style):
    name, step, args = transformer(style)
    state, batch = preset_specs("megatron", Step(step, args), MESH)
    assert {role: state["weights"][name[role]] for role in ROLES} == CUT
    assert {role: state["slots"][0].mu[name[role]] for role in ROLES} == CUT
    assert batch["tokens"] == P(("data",), None)


def whole_plan(style, preset):
    """Return all that a plan says, with parameters called by their roles."""
    name, step, args = transformer(style)
    roles = {own: role for role, own in name.items()}
    quick: dict[str, Any] = {
        "num_stages": 1,
        "num_microbatches": 1,
        "mesh_shape": (2, 4),
        "cache": False,
    }
    plan = alpa.parallelize(step, preset=preset, cluster="h100:8", **quick).plan_for(*args)

    def by_role(specs):
        return {
            re.sub(r"'(\w+)'", lambda found: repr(roles.get(found[1], found[1])), path): spec
            for path, spec in specs.items()
        }

    (stage,) = plan.shardings
    return {
        "state": by_role(stage.state_specs),
        "activations": by_role(stage.activation_specs),
        "communication": dict(stage.communication),
        "memory": dict(stage.memory),
        "peak": plan.stage_plan.peak_bytes,
        "seconds": plan.step_seconds,
        "bound": plan.lower_bound,
    }


@pytest.mark.sample(preset=1)
@pytest.mark.parametrize("preset", ["megatron", None, "2d", "zero3"])
def test_whole_plans_are_equal_under_the_names_of_every_library(preset):
    first, *others = (whole_plan(style, preset) for style in NAMES)
    assert len(first["state"]) == 3 * len(ROLES) + 3  # with moments, a count, and the batch
    for other in others:
        assert other == first


def test_key_heads_that_are_fewer_than_devices_stay_whole_and_the_share_says_so():
    name, step, args = transformer("meta")
    state, _ = preset_specs("megatron", Step(step, args), {"model": 16})
    assert state["weights"]["wk"] == state["weights"]["wv"] == P(None, None)
    assert state["weights"]["wq"] == P(None, ("model",))
    program = Step(step, args).program(1)
    found = coverage("megatron", program, logical_mesh(16))
    elements = {role: math.prod(args[0]["weights"][name[role]].shape) for role in ROLES}
    whole = elements["norm"] + elements["key"] + elements["value"]
    assert found.parameters == pytest.approx(1 - whole / sum(elements.values()))
    assert found.flops < 1


def test_fused_projections_are_cut_by_columns():
    def loss(params, x):
        q, k, v = jnp.split(x @ params["c_attn"], 3, axis=-1)
        q, k, v = (one.reshape(*x.shape[:2], 8, 8) for one in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["c_proj"]
        y = jax.nn.gelu(x @ params["mlp"]["c_fc"]) @ params["mlp"]["c_proj"]
        return jnp.mean(y * y)

    def step(params, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

    shapes: dict[str, Any] = {"c_attn": (64, 192), "c_proj": (64, 64)}
    shapes = {**shapes, "mlp": {"c_fc": (64, 256), "c_proj": (256, 64)}}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    found, _ = preset_specs("megatron", Step(step, (params, jnp.zeros((16, 8, 64)))), MESH)
    column, row = P(None, ("model",)), P(("model",), None)
    assert found == {"c_attn": column, "c_proj": row, "mlp": {"c_fc": column, "c_proj": row}}


def test_factored_optimiser_state_follows_the_dims_it_holds():
    def step(state, x):
        def loss(weights):
            return jnp.mean(jnp.tanh(jnp.tanh(x @ weights["first"]) @ weights["second"]))

        grads = jax.grad(loss)(state["weights"])
        rows = jax.tree.map(lambda v, g: 0.9 * v + (g * g).mean(1), state["rows"], grads)
        scaled = jax.tree.map(lambda g, v: g / (v[:, None] + 1e-6), grads, rows)
        weights = jax.tree.map(jnp.subtract, state["weights"], scaled)
        return {"weights": weights, "rows": rows, "count": state["count"] + 1}

    weights = {"first": jnp.zeros((12, 64)), "second": jnp.zeros((64, 12))}
    rows = {"first": jnp.zeros(12), "second": jnp.zeros(64)}
    state = {"weights": weights, "rows": rows, "count": jnp.zeros((), jnp.int32)}
    found, _ = preset_specs("megatron", Step(step, (state, jnp.zeros((16, 12)))), MESH)
    assert found["rows"] == {"first": P(None), "second": P(("model",))}


def logical_mesh(*sizes):
    return LogicalMesh(
        axes=tuple(MeshAxis(name=name, size=size) for name, size in zip("xyz", sizes))
    )


@pytest.fixture(scope="module")
def gpt():
    return step_of("gpt").program(1)


def test_every_preset_says_what_it_covers(gpt):
    mesh = logical_mesh(2, 4)
    assert coverage("dp", gpt, mesh) == Coverage(0.0, 1.0)
    assert coverage("zero3", gpt, mesh) == Coverage(1.0, 1.0)
    megatron = coverage("megatron", gpt, mesh)
    assert 0.98 < megatron.parameters < 1 and megatron.flops == 1


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
