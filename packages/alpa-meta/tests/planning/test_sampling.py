"""Random plans are feasible, reproducible, and keep what the options fix."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_meta as alpa

SHAPE = jax.ShapeDtypeStruct
STATE = [SHAPE((8, 8), jnp.float32)] * 4
BATCH = SHAPE((8, 8), jnp.float32)


def step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(weights)
    return [w - g for w, g in zip(weights, gradients)]


def plan(seed=0, **options):
    options = {"cluster": "host:8", "num_layers": 4, "batch_argnums": (1,), **options}
    return alpa.parallelize(step, **options).random_plan(STATE, BATCH, seed=seed)


def test_a_seed_gives_the_same_plan_again():
    first, second = plan(3), plan(3)
    assert [s.solution.choice for s in first.shardings] == [
        s.solution.choice for s in second.shardings
    ]
    assert first.layer_cuts == second.layer_cuts


def test_plans_differ_in_stages_microbatches_meshes_and_strategies():
    drawn = [plan(seed) for seed in range(8)]
    assert len({p.num_stages for p in drawn}) > 1
    assert len({p.num_microbatches for p in drawn}) > 1
    assert len({p.shardings[0].mesh.logical.shape for p in drawn}) > 1


def test_stages_cover_the_layers_on_devices_of_their_own():
    for seed in range(4):
        drawn = plan(seed)
        bounds = [
            (stage.candidate.layer_start, stage.candidate.layer_stop)
            for stage in drawn.stage_plan.stages
        ]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == len(drawn.layers)
        assert all(stop == start for (_, stop), (start, _) in zip(bounds, bounds[1:]))
        used = [device for sharding in drawn.shardings for device in sharding.mesh.device_ids]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(8))


def test_options_fix_what_they_name():
    drawn = plan(1, num_stages=3, num_microbatches=2, max_mesh_axes=1, schedule="gpipe")
    assert (drawn.num_stages, drawn.num_microbatches) == (3, 2)
    assert drawn.stage_plan.schedule == "gpipe"
    assert all(len(sharding.mesh.logical.axes) == 1 for sharding in drawn.shardings)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(alpa.PlanError, match="5 stages need as many layers and devices"):
        plan(num_stages=5)


def test_a_step_that_needs_whole_batches_gets_no_microbatches():
    def normalising(weight, batch):
        def loss(weight):
            hidden = batch @ weight
            return jnp.mean((jnp.tanh(hidden / hidden.std(0)) @ weight) ** 2)

        return weight - jax.grad(loss)(weight)

    sampler = alpa.parallelize(normalising, cluster="host:4", batch_argnums=(1,))
    assert {sampler.random_plan(STATE[0], BATCH, seed=k).num_microbatches for k in range(3)} == {1}
    halves: dict[str, Any] = {
        "cluster": "host:4", "batch_argnums": (1,), "num_stages": 1, "num_microbatches": 2,
    }  # fmt: skip
    with pytest.raises(alpa.PlanError, match="2 microbatches would change the result"):
        alpa.parallelize(normalising, **halves).random_plan(STATE[0], BATCH)
    made = alpa.parallelize(normalising, exact=False, **halves).random_plan(STATE[0], BATCH)
    with pytest.raises(alpa.PlanError, match="2 microbatches would change the result"):
        alpa.parallelize(normalising, plan=made).plan_for(STATE[0], BATCH)
