"""Recomputation chosen by the user: the same results in less memory, as the plan says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import alpa_meta as alpa
from alpa_interchange import ParallelPlan, load, save

LAYERS, WIDTH, BATCH = 4, 8, 64
SCANNED = {"cluster": "host:4", "max_mesh_axes": 1}
CLUSTER = {**SCANNED, "num_layers": LAYERS}


def _params():
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)) / 3,
        "down": jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)) / 3,
    }


BATCHES = jax.random.normal(jax.random.key(1), (1, BATCH, WIDTH))


def _block(x, layer):
    hidden = jnp.sin(x @ layer["up"])
    return x + jnp.tanh((hidden * jnp.cos(hidden)) @ layer["down"])


def _unrolled(params, x):
    for number in range(LAYERS):
        x = _block(x, jax.tree.map(lambda stack, number=number: stack[number], params))
    return jnp.mean(x**2)


def _scanned(params, x):
    x, _ = jax.lax.scan(lambda x, layer: (_block(x, layer), None), x, params)
    return jnp.mean(x**2)


def _dropped(params, x):
    keys = jax.random.split(jax.random.key(3), LAYERS)
    for number in range(LAYERS):
        layer = jax.tree.map(lambda stack, number=number: stack[number], params)
        kept = jax.random.bernoulli(keys[number], 0.9, x.shape)
        x = jnp.where(kept, _block(x, layer), 0.0)
    return jnp.mean(x**2)


def _step(loss):
    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def _parallel(loss, kind, **settings):
    fixed = SCANNED if loss is _scanned else CLUSTER
    return alpa.parallelize(_step(loss), recompute=kind, **{"cache": False, **fixed, **settings})


def _shapes(batch=BATCH):
    return jax.eval_shape(_params), jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)


WHOLE = {"num_stages": 1, "num_microbatches": 1}
PARTS = {"num_stages": 1, "num_microbatches": 2}
PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
MIXED = ("full", "none", "selective", "full")


@pytest.mark.parametrize(
    ("loss", "kind", "plan"),
    [
        pytest.param(_dropped, "full", PARTS, marks=pytest.mark.bulk),
        (_dropped, MIXED, PIPELINE),
        (_scanned, "full", WHOLE),
        pytest.param(_scanned, "selective", PARTS, marks=pytest.mark.bulk),
        pytest.param(_dropped, "selective", WHOLE, marks=pytest.mark.bulk),
        pytest.param(_scanned, "full", PIPELINE, marks=pytest.mark.bulk),
    ],
)
def test_recomputed_layers_give_the_results_of_one_device(agrees, loss, kind, plan):
    fixed = SCANNED if loss is _scanned else CLUSTER
    agrees(_step(loss), _params(), BATCHES, recompute=kind, **fixed, **plan)


@pytest.mark.sample(loss=1)
@pytest.mark.parametrize(("loss", "plan"), [(_unrolled, PARTS), (_scanned, WHOLE)])
def test_the_compiled_program_of_one_stage_takes_less_memory_as_planned(loss, plan):
    checks = []
    for kind in ("none", "full"):
        step = _parallel(loss, kind, preset="dp", **plan)
        audit = step.audit(*_shapes(64 * BATCH))
        assert audit.ok
        checks.append(audit.memory["train.0"])
    before, after = checks
    assert after.predicted_peak_bytes < 0.7 * before.predicted_peak_bytes
    assert after.temporary_bytes < 0.7 * before.temporary_bytes


@pytest.mark.sample(loss=1)
@pytest.mark.parametrize("loss", [_scanned, _unrolled])
def test_the_forward_program_of_a_stage_leaves_less_as_planned(loss):
    left, activations = [], []
    for kind in ("none", "selective", "full"):
        step = _parallel(loss, kind, preset="dp", **PIPELINE)
        step.plan_for(*_shapes())
        left.append(step.audit(*_shapes()).memory["forward.1"].output_bytes)
        activations.append(step.plan.shardings[1].memory["activations"])
    assert left[0] > left[1] > left[2]
    assert activations[0] > activations[1] > activations[2]
    assert left[0] - left[2] >= 0.9 * (activations[0] - activations[2])


def test_layers_of_scans_that_the_user_recomputes_are_priced_as_they_run():
    def loss(params, x):
        body = jax.checkpoint(lambda x, layer: (_block(x, layer), None))
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    step = _parallel(loss, "full", cluster="host:2", **{**PIPELINE, "num_microbatches": 1})
    plan = step.plan_for(*_shapes())
    assert 0.8 * plan.step_seconds < plan.lower_bound <= plan.step_seconds


def test_a_saved_plan_recomputes_what_it_says(tmp_path, agrees):
    plan = _parallel(_dropped, MIXED, **PIPELINE).plan_for(*_shapes())
    assert tuple(layer.recomputation for layer in plan.layers) == MIXED
    save(plan, tmp_path / "plan.json")
    loaded = load(tmp_path / "plan.json", ParallelPlan)
    step = agrees(_step(_dropped), _params(), BATCHES, plan=loaded, cluster="host:4")
    assert "optimization_barrier" in str(step.executable.tasks["backward.0"].closed)


def test_a_plan_is_kept_with_what_it_recomputes(tmp_path, monkeypatch):
    monkeypatch.setenv("ALPA_PLAN_CACHE", str(tmp_path))
    steps = [_parallel(_dropped, "full", cache=True, **WHOLE) for _ in range(2)]
    plans = [step.plan_for(*_shapes()) for step in steps]
    assert [step.plan_from_cache for step in steps] == [False, True]
    assert {layer.recomputation for plan in plans for layer in plan.layers} == {"full"}


def test_layers_that_the_step_has_not_are_refused():
    with pytest.raises(alpa.PlanError, match="recompute names 2 layers, .* into 4"):
        _parallel(_dropped, ("full", "none"), **WHOLE).plan_for(*_shapes())
