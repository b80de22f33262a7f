"""Pins are kept: of inputs by path, and of values inside the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_meta as alpa
from alpa_interchange import ShardingSpec
from alpa_meta.pinning import Pin
from cost_model import CostModel

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")
ONE_MESH: dict[str, Any] = {
    "cluster": "host:8",
    "num_stages": 1,
    "num_microbatches": 1,
    "mesh_shape": (2, 4),
}


def make_state(key):
    return {"in": jax.random.normal(key, (64, 128)) * 0.1, "out": jnp.ones((128, 64)) * 0.1}


def make_step(constrain):
    def loss(params, batch):
        hidden = constrain(jnp.tanh(batch["x"] @ params["in"]))
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    def train_step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}

    return train_step


def shapes():
    state = jax.eval_shape(make_state, jax.random.key(0))
    example = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    return state, {"x": example, "y": example}


def hidden_spec(step):
    plan = step.plan_for(*shapes())
    found = plan.shardings[0].activation_specs
    return found["step dot_general[16,128]"], plan


def test_a_pinned_value_is_sharded_as_pinned_and_the_result_is_right():
    step = alpa.parallelize(make_step(lambda h: alpa.pin(h, P("x", "y"))), **ONE_MESH)
    state = make_state(jax.random.key(0))
    batch = {"x": jnp.ones((16, 64)), "y": jnp.zeros((16, 64))}
    audit = step.audit(state, batch)
    assert audit.ok, audit.text()
    assert sum(len(report.planned) for report in audit.tasks.values()) > 0
    assert step.plan.shardings[0].activation_specs["step dot_general[16,128]"] == ShardingSpec(
        (("x",), ("y",))
    )


def test_without_the_pin_the_planner_chooses_otherwise():
    assert hidden_spec(alpa.parallelize(make_step(lambda h: h), **ONE_MESH))[0] != ShardingSpec(
        (("x",), ("y",))
    )


def test_a_sharding_constraint_in_the_step_is_kept_under_the_mesh_s_own_axis_names():
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", "model"))
    train_step = make_step(lambda h: jax.lax.with_sharding_constraint(h, sharding))
    step = alpa.parallelize(train_step, **ONE_MESH, axis_names=("data", "model"))
    assert hidden_spec(step)[0] == ShardingSpec((("data",), ("model",)))


def test_gathering_what_is_pinned_cut_for_a_pin_of_all_of_it_is_priced():
    def gathered(hidden):
        return alpa.pin(alpa.pin(hidden, P("x")) + 1.0, P())

    given: dict[str, Any] = ONE_MESH | {"cluster": "h100:8", "mesh_shape": (8,)}
    plan = alpa.parallelize(make_step(gathered), **given).plan_for(*shapes())
    mesh = plan.stage_plan.stages[0].candidate.logical
    size = 16 * 128 * 4.0
    least = CostModel(plan.cluster).collective_seconds("all-gather", size, mesh.axes)
    assert plan.shardings[0].collective_seconds["forward"] >= least


def test_a_pin_excludes_meshes_without_its_axes():
    free = {name: value for name, value in ONE_MESH.items() if name != "mesh_shape"}
    step = alpa.parallelize(make_step(lambda h: alpa.pin(h, P("x", "y"))), **free)
    spec, plan = hidden_spec(step)
    assert spec == ShardingSpec((("x",), ("y",)))
    assert len(plan.shardings[0].mesh.logical.axes) == 2


def test_an_axis_that_no_mesh_has_is_ignored_with_the_user_s_line():
    step = alpa.parallelize(make_step(lambda h: alpa.pin(h, P("expert"))), **ONE_MESH)
    with pytest.warns(UserWarning, match=r"test_pinning.py.* names mesh axis 'expert'"):
        step.plan_for(*shapes())


def test_an_unconstrained_dim_is_the_planner_s():
    step = alpa.parallelize(make_step(lambda h: alpa.pin(h, P(P.UNCONSTRAINED, "y"))), **ONE_MESH)
    assert hidden_spec(step)[0].dims[1] == ("y",)


def test_a_pinned_input_lives_as_pinned():
    pins = {"params['in']": P("y", "x")}
    plan = alpa.parallelize(make_step(lambda h: h), **ONE_MESH, pins=pins).plan_for(*shapes())
    assert plan.shardings[0].state_specs["params['in']"] == ShardingSpec((("y",), ("x",)))


def test_a_pin_that_does_not_divide_is_refused_with_the_remedy():
    pins = {"batch['x']": P(None, ("x", "y"))}
    odd = {"x": jax.ShapeDtypeStruct((16, 12), jnp.float32)}

    def train_step(params, batch):
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p) ** 2))(params)
        return params - gradients, value

    step = alpa.parallelize(train_step, **ONE_MESH, pins=pins)
    with pytest.raises(alpa.PlanError, match=r"pin of .*shards dim 1 of size 12 .*do not divide"):
        step.plan_for(jax.ShapeDtypeStruct((12, 8), jnp.float32), odd)


def test_a_pin_of_no_input_is_refused():
    for path, hint in (
        ("params['inn']", r"did you mean \"params\['in'\]\""),
        ("['in']", r"did you mean \"params\['in'\]\""),
        ("weights", r"its inputs are \"params\["),
    ):
        step = alpa.parallelize(make_step(lambda h: h), **ONE_MESH, pins={path: P()})
        with pytest.raises(alpa.PlanError, match=f"is no input of the step; {hint}"):
            step.plan_for(*shapes())


def test_a_pin_changes_nothing_where_there_is_no_plan():
    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(alpa.pin(x, P("x")), x)
    batched = jax.make_jaxpr(jax.vmap(lambda row: alpa.pin(row, P("x"))))(x)
    assert "('x',)" in str(batched)
    gradient = jax.grad(lambda v: jnp.sum(jax.jit(lambda w: alpa.pin(w, P("x")) ** 2)(v)))(x)
    np.testing.assert_allclose(gradient, 2 * x)
    with pytest.raises(alpa.PlanError, match="3 entries, but x has 2 dims"):
        alpa.pin(x, P("x", None, "y"))


def test_an_unreduced_sum_is_never_as_pinned():
    pin = Pin((("x",), None))
    assert pin.allows(ShardingSpec((("x",), ("y",))))
    assert not pin.allows(ShardingSpec((("x",), ()), ("y",)))
    assert not pin.allows(ShardingSpec(((), ("x",))))
