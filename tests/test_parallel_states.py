"""States as people keep them: structures, keys, frozen and tied leaves; all agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from two_layers import (
    BATCHES,
    PARTS,
    PIPELINE,
    QUICK,
    SIZE,
    descend,
    make_params,
    mean_loss,
    predict,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Training:
    params: dict[str, Any]
    optimizer: optax.OptState
    count: jax.Array


def _dataclass_case():
    optimizer = optax.adamw(1e-2, eps=1e-4)

    def step(state, batch):
        value, gradients = jax.value_and_grad(mean_loss)(state.params, batch)
        updates, inner = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return Training(params, inner, state.count + 1), {"loss": value}

    return step, Training(make_params(), optimizer.init(make_params()), jnp.zeros((), jnp.int32))


def _train_state_case():
    train_state = pytest.importorskip("flax.training.train_state")
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, eps=1e-4))
    state = train_state.TrainState.create(apply_fn=predict, params=make_params(), tx=optimizer)

    def step(state, batch):
        value, gradients = jax.value_and_grad(mean_loss)(state.params, batch)
        return state.apply_gradients(grads=gradients), {"loss": value}

    return step, state


def _nnx_case():
    pytest.importorskip("flax")
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(SIZE, 2 * SIZE, rngs=rngs)
            self.down = nnx.Linear(2 * SIZE, SIZE, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    definition, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, batch):
        def loss(state):
            model = nnx.merge(definition, state)
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return descend(state, gradients), {"loss": value}

    return step, state


def _equinox_case():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(SIZE, SIZE, 2 * SIZE, 2, activation=jax.nn.gelu, key=jax.random.key(0))

    def step(model, batch):
        def loss(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), {
            "loss": value
        }

    return step, model


def _multi_steps_case():
    optimizer = optax.MultiSteps(optax.adam(1e-2, eps=1e-4), every_k_schedule=2)
    return _optax_case(optimizer)


def _injected_case():
    optimizer = optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.0, 1e-2, 5), eps=1e-4
    )
    return _optax_case(optimizer)


def _optax_case(optimizer):
    def step(state, batch):
        params, inner = state
        value, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), {"loss": value}

    return step, (make_params(), optimizer.init(make_params()))


def _list_case():
    def step(state, batch):
        value, gradients = jax.value_and_grad(
            lambda weights: jnp.mean((jnp.tanh(batch["x"] @ weights[0]) @ weights[1] - 1) ** 2)
        )(state)
        return [w - 0.1 * g for w, g in zip(state, gradients)], {"loss": value}

    return step, [make_params()["up"], make_params()["down"]]


def _loss_scale_case():
    jmp = pytest.importorskip("jmp")  # its classes take nothing but arrays for their fields

    def step(state, batch):
        params, scale = state
        value, gradients = jax.value_and_grad(lambda p: scale.scale(mean_loss(p, batch)))(params)
        value, gradients = scale.unscale((value, gradients))
        finite = jmp.all_finite(gradients)
        params = jmp.select_tree(finite, descend(params, gradients), params)
        return (params, scale.adjust(finite)), {"loss": value, "finite": finite}

    return step, (make_params(), jmp.DynamicLossScale(jnp.float32(2.0**10), period=2))


CASES = {
    "nnx state": _nnx_case,
    "jmp loss scale": _loss_scale_case,
    "equinox module": _equinox_case,
    "optax.MultiSteps": _multi_steps_case,
    "dataclass": _dataclass_case,
    "TrainState": _train_state_case,
    "optax.inject_hyperparams": _injected_case,
    "list": _list_case,
}


@pytest.mark.sample(name=4)
@pytest.mark.parametrize("name", CASES)
def test_states_of_every_structure_are_taken_and_given_back(agrees, name):
    step, state = CASES[name]()
    one_device = jax.jit(step) if name != "equinox module" else _filtered(step)
    agrees(step, state, BATCHES, one_device=one_device, **PARTS)


@pytest.mark.sample(name=1)
@pytest.mark.parametrize("name", ["TrainState", "optax.MultiSteps", "equinox module"])
def test_states_of_every_structure_are_split_over_stages(agrees, name):
    step, state = CASES[name]()
    one_device = jax.jit(step) if name != "equinox module" else _filtered(step)
    agrees(step, state, BATCHES, one_device=one_device, **PIPELINE)


def _filtered(step):
    return pytest.importorskip("equinox").filter_jit(step)


def _noisy_step(state, batch):
    key, used = jax.random.split(state["key"])

    def loss(params):
        noise = 0.1 * jax.random.normal(used, params["up"].shape)
        return mean_loss({**params, "up": params["up"] + noise}, batch)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return {"params": descend(state["params"], gradients), "key": key}, {"loss": value}


@pytest.mark.sample("make_key", "options")
@pytest.mark.parametrize("options", [QUICK, PARTS, PIPELINE], ids=["whole", "parts", "two stages"])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_in_the_state_is_split_once_per_step(agrees, make_key, options):
    agrees(_noisy_step, {"params": make_params(), "key": make_key(5)}, BATCHES, **options)


@pytest.mark.parametrize("options", [PARTS, PIPELINE], ids=["one mesh", "two stages"])
def test_frozen_and_unread_leaves_come_back_unchanged(agrees, options):
    def step(state, batch):
        def loss(trained):
            return mean_loss({**trained, "bias": state["frozen"]["bias"]}, batch)

        value, gradients = jax.value_and_grad(loss)(state["trained"])
        trained = descend(state["trained"], gradients)
        return {**state, "trained": trained}, {"loss": value}

    params = make_params()
    frozen = {"bias": params.pop("bias") + 0.1}
    state = {"trained": params, "frozen": frozen, "note": jnp.arange(3), "old": jnp.ones((4, 4))}
    agrees(step, state, BATCHES, **options)


def test_tied_weights_of_two_stages_stay_equal(agrees):
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["tied"])
        for weight in params["inner"]:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean((hidden @ params["tied"].T - batch["y"]) ** 2)

    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-4))

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, inner = optimizer.update(gradients, state["inner"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "inner": inner}, value

    square = jnp.eye(2 * SIZE) + 0.1
    params = {"tied": make_params()["up"], "inner": [square, square.T / 2]}
    state = {"params": params, "inner": optimizer.init(params)}
    for num_stages in (2, 3):
        agrees(step, state, BATCHES, **{**PIPELINE, "num_stages": num_stages})
