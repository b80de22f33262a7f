"""Compiled steps: what they run, where inputs live, what they say of themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_meta as alpa

BATCH = np.ones((8, 8), np.float32)


def step(weights, batch):
    def loss(weights):
        return jnp.mean((jnp.tanh(batch @ weights["a"]) @ weights["b"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), {"loss": value}


def weights():
    return {"a": jnp.eye(8), "b": jnp.eye(8)}


@pytest.fixture(scope="module")
def pipeline():
    """Return a pipeline of two stages, run once."""
    parallel = alpa.parallelize(
        step,
        cluster="host:4",
        num_stages=2,
        num_microbatches=2,
        max_mesh_axes=1,
        schedule="1f1b",
    )
    parallel(weights(), BATCH)
    return parallel


def test_each_task_runs_on_the_mesh_of_its_stage(pipeline):
    executable = pipeline.executable
    assert {"forward.0", "forward.1", "backward.0", "backward.1"} <= set(executable.tasks)
    for name, task in executable.tasks.items():
        assert task.jax_mesh is executable.meshes[task.task.spec.mesh]
        assert executable.logical_mesh(name).shape == task.jax_mesh.devices.shape


def test_inputs_live_on_the_mesh_of_their_stage(pipeline):
    executable = pipeline.executable
    assert executable.input_sharding("weights['a']").mesh == executable.meshes[0]
    assert executable.input_sharding("weights['b']").mesh == executable.meshes[1]
    assert executable.input_sharding("weights['c']") is None


def test_every_task_has_its_text_and_its_planned_collectives(pipeline):
    texts = pipeline.executable.compiled_texts()
    assert set(texts) == set(pipeline.executable.planned_collectives())
    assert all(text.startswith("HloModule") for text in texts.values())


def test_a_batch_of_another_size_is_refused_by_the_executable(pipeline):
    with pytest.raises(alpa.PlanError, match="batch has 4 examples, the plan is for batches of 8"):
        pipeline.executable([*jax.tree.leaves(weights()), BATCH[:4]])


def test_tracing_can_be_switched_on_for_a_step(pipeline):
    executable = pipeline.executable
    executable.trace("blocking")
    pipeline(weights(), BATCH)
    executable.trace("none")
    tasks = {event.instruction.task for event in pipeline.last_trace}
    assert {"forward.0", "backward.1"} <= tasks


def test_a_plan_for_more_devices_than_given_is_refused(pipeline):
    planned = pipeline.lower(weights(), BATCH).planned
    with pytest.raises(alpa.PlanError, match="this process has 1"):
        alpa.Executable(planned, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def one_stage():
    """Return a data-parallel plan of one stage and one microbatch, run once."""
    parallel = alpa.parallelize(
        step, cluster="host:4", preset="dp", num_stages=1, num_microbatches=1
    )
    parallel(weights(), BATCH)
    return parallel


def test_a_plan_of_one_task_gives_the_same_with_and_without_the_runtime(one_stage):
    direct, metrics = one_stage(weights(), BATCH)
    one_stage.executable.trace("blocking")
    through_runtime, same = one_stage(weights(), BATCH)
    assert [event.instruction.task for event in one_stage.last_trace][0] == "train.0"
    one_stage.executable.trace("none")
    np.testing.assert_array_equal(direct["a"], through_runtime["a"])
    np.testing.assert_array_equal(direct["b"], through_runtime["b"])
    assert metrics["loss"] == same["loss"]
    assert one_stage.executable.audit().ok


def test_a_metric_of_one_stage_may_be_read_by_the_next():
    def reporting(weights, batch):
        def loss(weights):
            hidden, sizes = batch, []
            for weight in weights[:-1]:
                hidden = jnp.tanh(hidden @ weight)
                sizes.append(jnp.sum(hidden**2))
            value = jnp.mean((hidden @ weights[-1]) ** 2)
            return value * (1 + 0.01 * jax.lax.stop_gradient(sizes[0])) + 0.01 * sum(sizes), sizes

        value, gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(8, 8)) / 3) for _ in range(4)]
    batch = jnp.asarray(draw.normal(size=(8, 8)))
    expected = jax.jit(reporting)(weights, batch)
    parallel = alpa.parallelize(reporting, cluster="host:4", num_stages=2, num_microbatches=2)
    found = parallel.gather(parallel(jax.tree.map(jnp.copy, weights), batch))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
