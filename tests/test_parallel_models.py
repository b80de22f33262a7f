"""A parallel run equals the single-device run: models, stages, microbatches, random plans.

In float32 up to the order of additions (conftest.FLOAT32_TOLERANCE), in float64 up to 1e-10.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from attrs import evolve

import alpa_meta as alpa
from cost_model import cluster

BATCH = 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-4))
# eps is large so that Adam does not turn the rounding of a gradient near zero into a whole step


def _dense(key, *shape):
    return jax.random.normal(key, shape, jnp.result_type(float)) * shape[0] ** -0.5


def _mlp(key):
    """Return parameters of four layers of 16 features."""
    return [{"w": _dense(k, 16, 16), "b": jnp.zeros(16)} for k in jax.random.split(key, 4)]


def _mlp_loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def _mlp_batch(key):
    return {"x": _dense(key, BATCH, 16), "y": _dense(jax.random.fold_in(key, 1), BATCH, 16)}


def _conv_net(key):
    """Return parameters of a net of four convolutions with pooling and a linear head."""
    keys = jax.random.split(key, 5)
    widths = (4, 8, 8, 8, 8)
    kernels = [
        0.3 * jax.random.normal(k, (3, 3, n, m), jnp.result_type(float))
        for k, n, m in zip(keys, widths[:-1], widths[1:])
    ]
    return {"kernels": kernels, "head": _dense(keys[4], 8, 8)}


def _conv_net_loss(params, batch):
    x = batch["images"]
    for number, kernel in enumerate(params["kernels"]):
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.silu(x)
        if number == 1:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    logits = x.mean((1, 2)) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def _conv_net_batch(key):
    images = jax.random.normal(key, (BATCH, 8, 8, 4), jnp.result_type(float))
    return {"images": images, "labels": jax.random.randint(key, (BATCH,), 0, 8)}


LENGTH, HIDDEN, HEADS, VOCAB = 8, 16, 4, 32


def _gpt(key):
    """Return parameters of two transformer blocks whose embedding is also the output layer."""
    keys = jax.random.split(key, 6)
    blocks = []
    for k in keys[:2]:
        a, b, c, d = jax.random.split(k, 4)
        blocks.append(
            {
                "norms": jnp.ones((2, HIDDEN)),
                "qkv": _dense(a, HIDDEN, 3 * HIDDEN),
                "out": _dense(b, HIDDEN, HIDDEN),
                "up": _dense(c, HIDDEN, 4 * HIDDEN),
                "down": _dense(d, 4 * HIDDEN, HIDDEN),
            }
        )
    return {
        "embed": 4 * _dense(keys[4], VOCAB, HIDDEN),
        "position": _dense(keys[5], LENGTH, HIDDEN),
        "blocks": blocks,
    }


def _normalised(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _gpt_loss(params, batch):
    x = params["embed"][batch["tokens"]] + params["position"]
    visible = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for block in params["blocks"]:
        y = _normalised(x, block["norms"][0]) @ block["qkv"]
        q, k, v = jnp.split(y.reshape(*y.shape[:2], HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (HIDDEN / HEADS) ** 0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ block["out"]
        x = x + jax.nn.gelu(_normalised(x, block["norms"][1]) @ block["up"]) @ block["down"]
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def _gpt_batch(key):
    tokens = jax.random.randint(key, (BATCH, LENGTH + 1), 0, VOCAB)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


MODELS = {
    "mlp": (_mlp, _mlp_loss, _mlp_batch),
    "conv-net": (_conv_net, _conv_net_loss, _conv_net_batch),
    "gpt": (_gpt, _gpt_loss, _gpt_batch),
}


@cache
def _training(name, dtype="float32"):
    """Return (step, state, three batches) of a model; JAX traces and compiles equal steps once."""
    make, loss, make_batch = MODELS[name]
    assert jnp.result_type(float) == dtype

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, {"loss": value}

    @jax.jit
    def make_state(key):
        params = make(key)
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    batches = map(jax.jit(make_batch), jax.random.split(jax.random.key(1), 3))
    return step, make_state(jax.random.key(0)), list(batches)


def _cases(sample, others):
    return [*sample, *(pytest.param(*one, marks=pytest.mark.bulk) for one in others)]


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches"),
    _cases(
        [("conv-net", 1, 1), ("gpt", 2, 4)],
        [
            ("mlp", 1, 1),
            ("mlp", 2, 4),
            ("conv-net", 4, 8),
            ("gpt", 1, 1),
            ("conv-net", 2, 4),
            ("mlp", 4, 8),
            ("gpt", 4, 8),
        ],
    ),
)
def test_planned_runs_equal_the_single_device_run(agrees, name, num_stages, num_microbatches):
    step = agrees(
        *_training(name),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        max_mesh_axes=2 if num_stages == 1 and name == "mlp" else 1,
    )
    assert step.plan.num_stages == num_stages
    assert step.plan.num_microbatches == num_microbatches


@pytest.mark.sample(speeds=1)
@pytest.mark.parametrize("speeds", [(2.6, 0.4, 2.3, 0.8, 2.6), (2.0, 1.3, 3.0, 2.9, 2.2)])
def test_bounds_hold_for_tied_weights_whatever_the_speeds(speeds):
    hosts = cluster("host:8", measure=False)
    (group,) = hosts.host_groups
    memory, peak, launch, bandwidth, latency = speeds
    device = evolve(
        group.device,
        memory_bandwidth=group.device.memory_bandwidth * memory,
        peak_flops={name: peak * each for name, each in group.device.peak_flops.items()},
        launch_latency=group.device.launch_latency * launch,
    )
    link = evolve(
        group.intra_host,
        bandwidth=group.intra_host.bandwidth * bandwidth,
        latency=group.intra_host.latency * latency,
    )
    hosts = evolve(hosts, host_groups=(evolve(group, device=device, intra_host=link),))
    step, state, batches = _training("gpt")
    options = alpa.Options(num_stages=4, num_microbatches=8, max_mesh_axes=1, cache=False)
    plan = alpa.parallelize(step, cluster=hosts, options=options).plan_for(state, batches[0])
    assert plan.lower_bound <= plan.step_seconds  # else a BoundError


@pytest.mark.parametrize(
    ("name", "seed"),
    _cases(
        [("mlp", 0)],  # and others in float64, below
        [("conv-net", 1), ("mlp", 1), ("mlp", 4), ("conv-net", 3), ("gpt", 0), ("gpt", 3)],
    ),
)
def test_runs_by_random_plans_equal_the_single_device_run(agrees, name, seed):
    step, state, batches = _training(name)
    most: dict[str, Any] = {"num_stages": 2} if name == "gpt" else {}
    plan = alpa.parallelize(step, **most).random_plan(state, batches[0], seed=seed)
    agrees(step, state, batches, plan=plan)


@pytest.mark.parametrize("name", ["mlp", "conv-net", pytest.param("gpt", marks=pytest.mark.bulk)])
def test_in_float64_a_random_plan_agrees_to_ten_digits(agrees, name):
    with jax.enable_x64(True):
        step, state, batches = _training(name, "float64")
        sampler = alpa.parallelize(step, num_stages=2, num_microbatches=2)
        plan = sampler.random_plan(state, batches[0], seed=7)
        agrees(step, state, batches, plan=plan, tolerance=1e-10)


@pytest.mark.sample(schedule=1)
@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_other_schedules_compute_the_same(agrees, schedule):
    agrees(*_training("mlp"), num_stages=2, num_microbatches=4, max_mesh_axes=1, schedule=schedule)
