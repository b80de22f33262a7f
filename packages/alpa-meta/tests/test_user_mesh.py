"""A step's own mesh is the one that is planned for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_meta as alpa
from alpa_interchange import ShardingSpec

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")
WHOLE: dict[str, Any] = {"cluster": "host:8", "num_stages": 1, "num_microbatches": 1}
SPEC = P("data", "model")


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    return Mesh(devices.reshape(shape), tuple(sizes), axis_types=types)


def make_step(sharding):
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        hidden = jax.lax.with_sharding_constraint(hidden, sharding)
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    def train_step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}

    return train_step


def arguments():
    params = {"in": 0.1 * jnp.ones((64, 128)), "out": 0.1 * jnp.ones((128, 64))}
    return params, {"x": jnp.ones((16, 64)), "y": jnp.zeros((16, 64))}


def planned(sharding, **settings):
    """Return ({axis: size}, spec of the constrained value) of the plan."""
    plan = alpa.parallelize(make_step(sharding), **{**WHOLE, **settings}).plan_for(*arguments())
    mesh = plan.shardings[0].mesh.logical
    found = plan.shardings[0].activation_specs["step dot_general[16,128]"]
    return dict(zip(mesh.axis_names, mesh.shape, strict=True)), found


@pytest.mark.parametrize(
    "sharding",
    [
        lambda: NamedSharding(mesh_of(data=2, model=4), SPEC),
        lambda: NamedSharding(AbstractMesh((2, 4), ("data", "model")), SPEC),
    ],
)
def test_a_mesh_of_as_many_devices_is_planned_for_as_it_is(sharding):
    sizes, spec = planned(sharding())
    assert sizes == {"data": 2, "model": 4} and spec == ShardingSpec((("data",), ("model",)))


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
@pytest.mark.parametrize("set_mesh", [jax.set_mesh, lambda mesh: mesh])
def test_a_step_under_a_mesh_that_is_set_runs_and_is_its_plan(set_mesh):
    step = alpa.parallelize(make_step(SPEC), **WHOLE)
    expected = jax.jit(make_step(NamedSharding(mesh_of(data=2, model=4), SPEC)))(*arguments())[1]
    with set_mesh(mesh_of(data=2, model=4)):
        state, batch = arguments()
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
        step(state, batch)  # by the direct call
        assert step.executable.audit().ok
    assert step.plan.shardings[0].mesh.logical.axis_names == ("data", "model")


def test_axes_of_one_device_are_left_out_without_a_word():
    mesh = mesh_of(data=1, fsdp=2, expert=1, tensor=4)
    sizes, spec = planned(NamedSharding(mesh, P(("data", "fsdp"), "tensor")))
    assert sizes == {"fsdp": 2, "tensor": 4} and spec == ShardingSpec((("fsdp",), ("tensor",)))


@pytest.mark.parametrize("shape", [(4, 4), (1, 1)])
def test_a_mesh_of_another_number_of_devices_is_kept_by_name_and_says_so(shape):
    sharding = NamedSharding(AbstractMesh(shape, ("data", "model")), SPEC)
    with pytest.warns(UserWarning, match=r"axes data, model are kept by name, with sizes"):
        sizes, spec = planned(sharding)
    assert set(sizes) == {"data", "model"} and np.prod(list(sizes.values())) == 8
    assert spec == ShardingSpec((("data",), ("model",)))


def test_a_mesh_shape_of_the_options_sizes_the_axes_of_the_step():
    sizes, _ = planned(NamedSharding(mesh_of(data=2, model=4), SPEC), mesh_shape=(4, 2))
    assert sizes == {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_names": ("a", "b")}, r"constraint at .*test_user_mesh.* names mesh axis 'data'"),
        ({"mesh_shape": (8,)}, r"has 1 axes, but .* are for 2: data, model"),
    ],
)
def test_options_that_contradict_the_step_s_mesh_are_refused(options, message):
    with pytest.raises(alpa.PlanError, match=message):
        planned(NamedSharding(mesh_of(data=2, model=4), SPEC), **options)


def test_one_axis_of_two_sizes_is_refused():
    def train_step(params, x):
        def loss(w):
            y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh_of(data=8), P("data")))
            y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh_of(data=4), P("data")))
            return jnp.mean(y**2)

        return params - jax.grad(loss)(params)

    with pytest.raises(alpa.PlanError, match="axis 'data' has 4 devices .* but 8 in one before"):
        alpa.parallelize(train_step, **WHOLE).plan_for(jnp.ones((8, 8)), jnp.ones((16, 8)))


def test_a_random_plan_keeps_the_step_s_axes():
    step = alpa.parallelize(make_step(NamedSharding(mesh_of(data=8), P("data"))), **WHOLE)
    plan = step.random_plan(*arguments(), seed=1)
    assert plan.shardings[0].mesh.logical.axis_names == ("data",)
