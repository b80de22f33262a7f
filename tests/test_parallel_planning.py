"""Planning without running, shared compilations, and refusals that say what to do."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_meta as alpa
from alpa_interchange.document import from_json, load, save, to_json
from alpa_meta.report.plan_table import plan_summary

SIZE, BATCH = 16, 8
QUICK: dict[str, Any] = {"num_stages": 1, "max_mesh_axes": 1, "cluster": "host:4"}


def _loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def _step(params, batch):
    value, gradients = jax.value_and_grad(_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}


def _params(size=SIZE):
    ones = jnp.ones((size, 2 * size)) / size
    return {"up": ones, "down": ones.T}


def _batch(count=BATCH, size=SIZE):
    return {"x": jnp.ones((count, size)), "y": jnp.zeros((count, size))}


def _shapes(tree):
    return jax.eval_shape(lambda: tree)


@pytest.fixture(scope="module")
def step():
    """Return a parallel step, planned and run once."""
    parallel = alpa.parallelize(_step, **QUICK)
    parallel(_params(), _batch())
    return parallel


def test_shapes_are_enough_to_plan(step):
    planned = alpa.parallelize(_step, **QUICK).plan_for(_shapes(_params()), _shapes(_batch()))
    assert planned.program == step.plan.program
    assert planned.shardings[0].state_specs == step.plan.shardings[0].state_specs


def test_a_cluster_that_is_not_here_can_be_planned_for():
    plan = alpa.parallelize(_step, cluster="h100:16", num_stages=1, mesh_shape=(16,)).plan_for(
        _shapes(_params(64)), _shapes(_batch(64, 64))
    )
    assert sum(len(sharding.mesh.device_ids) for sharding in plan.shardings) == 16
    assert 0 < plan.lower_bound <= plan.step_seconds


def test_lowering_and_calls_share_one_compilation(step):
    assert step.lower(_params(), _batch()).compile() is step.executable
    assert step.lower(_shapes(_params()), _shapes(_batch())).compile() is step.executable


def test_another_batch_size_is_planned_again_and_both_stay_usable(step, close):
    expected = jax.jit(_step)
    before = step.lower(_params(), _batch()).compile()
    close(step(_params(), _batch(16)), expected(_params(), _batch(16)))
    assert step.plan.program.batch_size == 16
    close(step(_params(), _batch()), expected(_params(), _batch()))
    assert step.executable is before


def test_a_saved_plan_runs_and_names_its_program(step, tmp_path, close):
    save(step.plan, tmp_path / "plan.json")
    plan = load(tmp_path / "plan.json", alpa.ParallelPlan)
    again = alpa.parallelize(_step, plan=plan)
    close(again(_params(), _batch()), jax.jit(_step)(_params(), _batch()))
    assert again.plan == plan
    assert {item.path for item in plan.program.inputs} == {
        "params['up']",
        "params['down']",
        "batch['x']",
        "batch['y']",
    }


# -------------------------------------------------------------------------- refusals


def test_a_plan_of_other_shapes_is_refused_with_the_differences(step):
    other = alpa.parallelize(_step, plan=step.lower(_params(), _batch()).plan)
    with pytest.raises(alpa.PlanError) as refusal:
        other(_params(32), _batch(size=32))
    message = str(refusal.value)
    assert "plan float32[16,32], program float32[32,64]" in message
    assert "params['up']" in message


def test_a_plan_of_another_program_with_the_same_inputs_is_refused(step):
    def other_step(params, batch):
        value, gradients = jax.value_and_grad(lambda p, b: jnp.sin(_loss(p, b)))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}

    other = alpa.parallelize(other_step, plan=step.lower(_params(), _batch()).plan)
    with pytest.raises(alpa.PlanError, match="the inputs agree, but the operations differ"):
        other.plan_for(_params(), _batch())


def test_a_plan_runs_by_what_it_says_whatever_its_numbers(step):
    plan = step.lower(_params(), _batch()).plan
    document = json.loads(to_json(plan))
    del document["sha256"]
    solution = document["value"]["shardings"][0]["solution"]
    solution["choice"] = [10_000] * len(solution["choice"])
    damaged = from_json(json.dumps(document), alpa.ParallelPlan)
    again = alpa.parallelize(_step, plan=damaged)
    assert again.plan_for(_params(), _batch()) == plan


def test_a_plan_with_a_damaged_operator_is_refused_by_name(step):
    document = json.loads(to_json(step.lower(_params(), _batch()).plan))
    del document["sha256"]
    group = document["value"]["shardings"][0]["operators"][0]
    group["strategy"]["operands"] = []
    plan = from_json(json.dumps(document), alpa.ParallelPlan)
    with pytest.raises(alpa.PlanError, match=re.escape(repr(group["names"][0]))):
        alpa.parallelize(_step, plan=plan)(_params(), _batch())


def test_a_plan_for_more_devices_than_there_are_is_refused():
    plan = alpa.parallelize(_step, cluster="host:16", num_stages=1, max_mesh_axes=1).plan_for(
        _params(), _batch(16)
    )
    with pytest.raises(alpa.PlanError, match=r"for 16 devices .* this process has 8.*=16"):
        alpa.parallelize(_step, plan=plan)(_params(), _batch(16))


def test_a_batch_that_the_microbatches_do_not_divide_is_refused_with_numbers_that_do():
    with pytest.raises(alpa.PlanError, match=r"8 examples, which 3 .*one of \[1, 2, 4, 8\]"):
        alpa.parallelize(_step, **QUICK, num_microbatches=3).plan_for(_params(), _batch())


def test_a_step_without_a_gradient_is_refused():
    def evaluate(params, batch):
        return params, _loss(params, batch)

    with pytest.raises(alpa.PlanError, match="no gradient was found in the step"):
        alpa.parallelize(evaluate, **QUICK).plan_for(_params(), _batch())


def test_a_step_without_a_batch_runs_but_not_in_microbatches():
    def step(params):
        return jax.tree.map(
            lambda p, g: p - g, params, jax.grad(lambda p: (p["up"] ** 2).sum())(params)
        )

    assert alpa.parallelize(step, **QUICK, donate=False).audit(_params()).ok
    with pytest.raises(alpa.PlanError, match="looks like a batch .*with batch_argnums"):
        alpa.parallelize(step, **QUICK, num_microbatches=2).plan_for(_params())


def _noisy_step(params, batch):
    def loss(params):
        weighted = _loss(params, batch) * batch["weight"].mean()
        return weighted + (jnp.tanh(batch["noise"] @ params["up"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def _uneven_batch(size=8):
    return {**_batch(size), "noise": jnp.ones((12, SIZE)), "weight": jnp.arange(3.0)}


@pytest.mark.sample(options=2)
@pytest.mark.parametrize("options", [{"num_stages": 2}, {"preset": "zero3"}, {}])
def test_a_batch_without_a_common_first_dim_is_taken_whole(options):
    parallel = alpa.parallelize(_noisy_step, cluster="host:4", max_mesh_axes=1, **options)
    assert parallel.audit(_params(), _uneven_batch()).ok
    plan = parallel.plan
    assert (plan.num_microbatches, plan.program.batch_size) == (1, None)
    assert "one microbatch: the arrays of the batch differ in their first" in plan_summary(plan)
    saved = from_json(to_json(plan), alpa.ParallelPlan)
    assert saved == plan
    assert alpa.parallelize(_noisy_step, plan=saved).plan_for(_params(), _uneven_batch()) == plan


@pytest.mark.parametrize("exact", [True, False])
def test_a_batch_without_a_common_first_dim_is_not_cut(exact):
    parallel = alpa.parallelize(_noisy_step, **QUICK, num_microbatches=2, exact=exact)
    with pytest.raises(alpa.PlanError) as refusal:
        parallel.plan_for(_params(), _uneven_batch())
    for part in ("batch['noise'] float32[12, 16]", "batch['weight'] float32[3]", "batch_argnums"):
        assert part in str(refusal.value)


def test_the_plan_says_why_other_numbers_of_microbatches_were_refused():
    def step(params, batch):
        def loss(params):
            hidden = batch["x"] @ params["up"]
            return jnp.mean(jnp.square((hidden / hidden.std(0)) @ params["down"]))

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    plan = alpa.parallelize(step, cluster="host:4", max_mesh_axes=1).plan_for(_params(), _batch())
    assert plan.num_microbatches == 1
    assert "mixes examples of the batch" in plan.program.uncut
    assert not alpa.parallelize(step, **QUICK).plan_for(_params(), _batch()).program.uncut


@pytest.mark.parametrize("num_microbatches", [1, None])
def test_memory_that_no_plan_fits_is_refused_with_the_missing_bytes(num_microbatches):
    limited = alpa.parallelize(_step, **QUICK, memory=1000.0, num_microbatches=num_microbatches)
    with pytest.raises(alpa.InfeasibleError, match="cheapest remedy") as refusal:
        limited.plan_for(_params(), _batch())
    assert 0 < refusal.value.missing_bytes < 20_000
    enough = 1000.0 + refusal.value.missing_bytes
    assert f"{1000:,} bytes" in str(refusal.value)
    assert alpa.parallelize(_step, **QUICK, memory=8 * enough).plan_for(_params(), _batch())


def test_an_unknown_cluster_is_refused():
    with pytest.raises(alpa.PlanError, match="'h1000:8' is not a preset"):
        alpa.parallelize(_step, cluster="h1000:8").plan_for(_params(), _batch())


def test_a_mesh_that_the_devices_do_not_make_is_refused():
    with pytest.raises(alpa.PlanError, match=r"mesh_shape=\(3,\), 4 devices"):
        alpa.parallelize(_step, cluster="host:4", num_stages=1, mesh_shape=(3,)).plan_for(
            _params(), _batch()
        )


def test_more_stages_than_devices_are_refused():
    with pytest.raises(alpa.PlanError, match="num_stages=5 .* 4 devices"):
        alpa.parallelize(_step, cluster="host:4", num_stages=5).plan_for(_params(), _batch())


def test_more_stages_than_layers_are_refused():
    def step(params, batch):
        def descend(params, _):
            gradients = jax.grad(_loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), None

        return jax.lax.scan(descend, params, None, length=3)[0]

    why = "2 stages .* more than 1, as its gradients are made inside a loop; .*the step that the"
    with pytest.raises(alpa.PlanError, match=why):
        alpa.parallelize(step, cluster="host:4", num_stages=2).plan_for(_params(), _batch())


def test_a_step_that_was_never_called_has_no_plan():
    fresh = alpa.parallelize(_step)
    with pytest.raises(alpa.PlanError, match="no plan yet"):
        _ = fresh.plan
    with pytest.raises(alpa.PlanError, match="not compiled yet"):
        _ = fresh.executable


def test_a_state_of_another_structure_is_refused_by_init(step):
    with pytest.raises(alpa.PlanError, match="arrays"):
        step.place({"up": jnp.ones((SIZE, 2 * SIZE))})


def test_the_error_inside_the_users_step_is_shown_as_it_is():
    def wrong(params, batch):
        return _step(params, {**batch, "x": batch["x"] @ batch["x"]})

    with pytest.raises(TypeError, match="dot_general"):
        alpa.parallelize(wrong, **QUICK).plan_for(_params(), _batch())
