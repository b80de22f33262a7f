"""Training steps in the idiom of equinox's examples: models of one example, vmapped over keys."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from library_programs.batches import EXAMPLES, WIDTH, images, points


def _state(model, transform):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return (params, transform.init(params)), static


class PatchTransformer(eqx.Module):
    """Attention over the patches of one image."""

    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    positions: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Linear(16, WIDTH, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, dropout_p=0.1, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=keys[2])
        self.head = eqx.nn.Linear(WIDTH, 4, key=keys[3])
        self.dropout = eqx.nn.Dropout(0.1)
        self.positions = 0.1 * jax.random.normal(keys[4], (4, WIDTH))

    def __call__(self, image, key):
        first, second = jax.random.split(key)
        patches = image.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
        x = jax.vmap(self.embed)(patches) + self.positions
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, key=first)
        x = x + self.dropout(jax.vmap(self.mlp)(x), key=second)
        return self.head(x.mean(0))


def vision_transformer():
    """A key split into one key per example."""
    model, batch = PatchTransformer(jax.random.key(0)), images()
    transform = optax.adamw(1e-2, eps=1e-3)
    state, static = _state(model, transform)

    def step(carried, batch):
        (params, opt_state), key = carried
        key, own = jax.random.split(key)

        def loss_fn(params):
            model = eqx.combine(params, static)
            keys = jax.random.split(own, batch["image"].shape[0])
            logits = jax.vmap(model)(batch["image"][..., 0], keys)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return ((optax.apply_updates(params, updates), opt_state), key), loss

    return step, (state, jax.random.key(1)), batch


class Recurrent(eqx.Module):
    """A GRU over one sequence, and a linear read-out."""

    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, WIDTH, key=first)
        self.out = eqx.nn.Linear(WIDTH, 1, key=second)

    def __call__(self, sequence):
        def advance(carry, x):
            return self.cell(x, carry), None

        last, _ = jax.lax.scan(advance, jnp.zeros(WIDTH), sequence)
        return jax.nn.sigmoid(self.out(last))[0]


def recurrent_network():
    """A scan over the time of one example, vmapped; binary cross-entropy."""
    model = Recurrent(jax.random.key(0))
    draw = np.random.default_rng(0)
    batch = (
        jnp.asarray(draw.normal(size=(EXAMPLES, 5, 2)).astype("float32")),
        jnp.asarray(draw.integers(0, 2, EXAMPLES).astype("float32")),
    )
    transform = optax.adam(1e-2, eps=1e-3)
    state, static = _state(model, transform)

    def step(state, batch):
        params, opt_state = state
        x, y = batch

        def loss_fn(params):
            predicted = jax.vmap(eqx.combine(params, static))(x)
            return -jnp.mean(y * jnp.log(predicted) + (1 - y) * jnp.log(1 - predicted))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (eqx.apply_updates(params, updates), opt_state), loss

    return step, state, batch


def physics_informed():
    """Second derivatives of the network by its input, at points drawn inside the step."""
    model = eqx.nn.MLP(2, "scalar", WIDTH, 2, jnp.tanh, key=jax.random.key(0))
    draw = np.random.default_rng(0)
    batch = {
        "inside": jnp.asarray(draw.uniform(size=(EXAMPLES, 2)).astype("float32")),
        "edge": jnp.asarray(draw.uniform(size=(EXAMPLES, 2)).astype("float32")),
    }
    transform = optax.adam(1e-2, eps=1e-3)
    state, static = _state(model, transform)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            u = eqx.combine(params, static)

            def residual(point):
                laplacian = jnp.trace(jax.hessian(u)(point))
                return laplacian + jnp.sin(jnp.pi * point[0])

            interior = jnp.mean(jax.vmap(residual)(batch["inside"]) ** 2)
            boundary = jnp.mean(jax.vmap(u)(batch["edge"]) ** 2)
            return interior + 10.0 * boundary, (interior, boundary)

        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), (loss, parts)

    return step, state, batch


def score_based_diffusion():
    """Times spread over the examples by one draw, noise by a key for each of them."""
    model = eqx.nn.MLP(WIDTH + 1, WIDTH, 16, 1, key=jax.random.key(0))
    batch = points()["x"]
    transform = optax.adabelief(3e-3)
    state, static = _state(model, transform)

    def single_loss(model, data, t, key):
        mean = data * jnp.exp(-0.5 * t)
        std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
        noise = jax.random.normal(key, data.shape)
        predicted = model(jnp.append(mean + std * noise, t))
        return (1 - jnp.exp(-t)) * jnp.mean((predicted + noise / std) ** 2)

    def step(carried, batch):
        (params, opt_state), key = carried
        key, own = jax.random.split(key)

        def loss_fn(params):
            model = eqx.combine(params, static)
            size = batch.shape[0]
            time_key, loss_key = jax.random.split(own)
            loss_keys = jax.random.split(loss_key, size)
            t = jax.random.uniform(time_key, (size,), minval=0, maxval=10.0 / size)
            t = t + (10.0 / size) * jnp.arange(size)
            losses = jax.vmap(single_loss, in_axes=(None, 0, 0, 0))(model, batch, t, loss_keys)
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return ((eqx.apply_updates(params, updates), opt_state), key), loss

    return step, (state, jax.random.key(1)), batch


def denoising_diffusion():
    """A timestep drawn for each example, a table of noise levels looked up; moving average."""
    model = eqx.nn.MLP(WIDTH + 1, WIDTH, 16, 1, key=jax.random.key(0))
    batch = points()["x"]
    transform = optax.adam(3e-3, eps=1e-3)
    (params, opt_state), static = _state(model, transform)
    kept = jnp.cumprod(1.0 - jnp.linspace(1e-4, 0.02, 50))

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(9), state["step"])
        time_key, noise_key = jax.random.split(key)
        t = jax.random.randint(time_key, (batch.shape[0],), 0, 50)
        noise = jax.random.normal(noise_key, batch.shape)
        level = kept[t][:, None]
        noisy = jnp.sqrt(level) * batch + jnp.sqrt(1 - level) * noise

        def loss_fn(params):
            model = eqx.combine(params, static)
            predicted = jax.vmap(model)(jnp.concatenate([noisy, t[:, None] / 50], axis=1))
            snr = level[:, 0] / (1 - level[:, 0])
            weight = jnp.minimum(snr, 5.0) / snr
            return jnp.mean(weight * jnp.mean((predicted - noise) ** 2, axis=1))

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = transform.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        new = {
            "params": params,
            "average": optax.incremental_update(params, state["average"], 0.01),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return new, loss

    state = {"params": params, "average": params, "opt_state": opt_state, "step": jnp.int32(0)}
    return step, state, batch
