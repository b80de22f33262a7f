"""Trains an equinox module: state may be any pytree, functions inside it included.

Needs equinox (`pip install equinox`). Run with: python examples/equinox_module.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import alpa_meta as alpa

jax.config.update("jax_num_cpu_devices", 8)
optimiser = optax.sgd(0.1)


def make_state(key):
    model = eqx.nn.MLP(in_size=32, out_size=8, width_size=64, depth=2, key=key)
    return model, optimiser.init(eqx.filter(model, eqx.is_array))


def train_step(state, batch):
    model, moments = state

    def loss_of(model):
        predicted = jax.vmap(model)(batch["x"])
        return jnp.mean((predicted - batch["y"]) ** 2)

    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, moments = optimiser.update(gradients, moments)
    return (eqx.apply_updates(model, updates), moments), loss


step = alpa.parallelize(train_step, cluster="host:8")
key = jax.random.key(1)
batch = {"x": jax.random.normal(key, (64, 32)), "y": jnp.ones((64, 8))}
state = step.init(make_state, jax.random.key(0))
for number in range(20):
    state, loss = step(state, batch)
    if number % 10 in (0, 9):
        print(f"step {number}: loss {float(loss):.4f}")
