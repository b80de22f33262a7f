"""Scans over layers cut between stages: every stage trains its own layers, as one device would."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_meta as alpa
from alpa_meta.execution.piecewise import PiecewiseArray

LAYERS, WIDTH, BATCH = 6, 8, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-4))
PIPELINE: dict[str, Any] = {"cluster": "host:4", "max_mesh_axes": 1}


def _params(layers=LAYERS):
    up, down, head = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": {
            "up": jax.random.normal(up, (layers, WIDTH, 2 * WIDTH)) / 3,
            "bias": jnp.zeros((layers, 2 * WIDTH)),
            "down": jax.random.normal(down, (layers, 2 * WIDTH, WIDTH)) / 3,
        },
        "head": jax.random.normal(head, (WIDTH, WIDTH)) / 3,
    }


def _batch(seed):
    x, y = jax.random.normal(jax.random.key(seed), (2, BATCH, WIDTH))
    return {"x": x, "y": y}


BATCHES = [_batch(seed) for seed in (1, 2)]


def _block(layer, x):
    return x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]


def _loss(x, params, batch):
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def _plain(params, batch):
    x, _ = jax.lax.scan(lambda x, layer: (_block(layer, x), None), batch["x"], params["layers"])
    return _loss(x, params, batch)


def _intricate(params, batch):
    """Return a loss of layers scaled beforehand, run from the last to the first and recomputed.

    Each runs a scan over positions; what the scan over layers puts out is part of the loss.
    """

    def body(x, layer):
        def position(total, one):
            return total + one, jnp.tanh(total)

        _, sums = jax.lax.scan(position, jnp.zeros_like(x[:, 0]), x.T)
        x = _block(layer, x) + 0.1 * sums.T
        return x, (jnp.mean(x**2), x.mean(axis=-1))

    scaled = jax.tree.map(lambda p: 0.5 * p, params["layers"])
    x, (sizes, means) = jax.lax.scan(jax.checkpoint(body), batch["x"], scaled, reverse=True)
    weights = jnp.arange(sizes.shape[0], dtype=sizes.dtype)
    spread = (means * means).mean(axis=1).sum()
    return _loss(x, params, batch) + 1e-2 * (sizes * weights).sum() + 1e-2 * spread


def _step_of(loss, optimizer=OPTIMIZER):
    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value}

    return step


def _state(layers=LAYERS, optimizer=OPTIMIZER):
    params = _params(layers)
    return params, optimizer.init(params)


CASES = {"intricate": (_intricate, 2, 2), "four uneven stages": (_plain, 4, 4)}


@pytest.mark.sample(case=1)
@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_that_cuts_a_scan_equals_one_device(agrees, case):
    loss, stages, count = CASES[case]
    step = agrees(
        _step_of(loss),
        _state(),
        BATCHES,
        num_stages=stages,
        num_microbatches=count,
        **PIPELINE,
    )
    state = step.place(_state())
    up, moment = state[0]["layers"]["up"], state[1][1][0].mu["layers"]["up"]
    assert isinstance(up, PiecewiseArray)
    assert up.bounds == moment.bounds
    assert len(up.pieces) == stages
    meshes = [set(piece.sharding.device_set) for piece in up.pieces]
    assert all(not (one & other) for one, other in zip(meshes, meshes[1:]))
    read = {name for task in step.executable.tasks.values() for name in task.task.spec.inputs}
    joined = [name for name in read if name.endswith("['up']")]
    assert not joined  # no mesh ever holds the layers of all stages


SGD = optax.sgd(0.1)
SMALL: dict[str, Any] = {**PIPELINE, "num_stages": 2, "num_microbatches": 1}


@pytest.fixture(scope="module")
def pipeline():
    """Return a step of seven layers on two stages, planned."""
    step = alpa.parallelize(_step_of(_plain, SGD), **SMALL)
    step.plan_for(_state(7, SGD), BATCHES[0])
    return step


def test_state_born_in_pieces_is_that_of_make(pipeline, close):
    born = pipeline.init(lambda: _state(7, SGD))
    up = born[0]["layers"]["up"]
    assert isinstance(up, PiecewiseArray)
    assert up.shape == (7, WIDTH, 2 * WIDTH)
    close(pipeline.gather(born), _state(7, SGD), 1e-6)


def test_a_length_that_the_stages_do_not_divide_is_cut_unevenly(pipeline, close):
    state, metrics = pipeline(_state(7, SGD), BATCHES[0])
    expected, losses = jax.jit(_step_of(_plain, SGD))(_state(7, SGD), BATCHES[0])
    close((pipeline.gather(state), metrics), (expected, losses))
    first, second = np.diff(state[0]["layers"]["up"].bounds)
    assert first + second == 7


def test_a_saved_plan_and_another_plan_take_the_state_as_it_is(pipeline, close):
    state, _ = pipeline(_state(7, SGD), BATCHES[0])
    whole = pipeline.gather(state)
    expected, _ = pipeline(whole, BATCHES[1])
    saved = alpa.parallelize(_step_of(_plain, SGD), plan=pipeline.plan)
    again, _ = saved(pipeline.place(whole), BATCHES[1])
    close(saved.gather(again), pipeline.gather(expected), 0.0)
    one_stage = alpa.parallelize(_step_of(_plain, SGD), cluster="host:4", num_stages=1)
    moved, _ = one_stage(pipeline.place(whole), BATCHES[1])
    assert isinstance(moved[0]["layers"]["up"], jax.Array)
    close(moved, pipeline.gather(expected))


def test_a_random_plan_that_cuts_a_scan_agrees(agrees):
    step = _step_of(_plain, SGD)
    planner = alpa.parallelize(step, cluster="host:4", num_stages=3, num_microbatches=2)
    plan = planner.random_plan(_state(7, SGD), BATCHES[0], seed=1)
    found = agrees(step, _state(7, SGD), BATCHES, plan=plan)
    assert any("[" in item.path and ":" in item.path for item in found.plan.program.inputs)
