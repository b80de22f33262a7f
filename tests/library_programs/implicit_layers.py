"""Training steps in the idiom of blackjax, jaxopt, optimistix, lineax and penzai."""

from __future__ import annotations

from typing import Any

import blackjax
import equinox as eqx
import jax
import jax.numpy as jnp
import jaxopt
import lineax
import optax
import optimistix
from penzai import pz

from library_programs.batches import WIDTH, images, points


def regularised_classifier():
    """`jaxopt.OptaxSolver` on a loss with l2 regularisation; its state knows error and value."""
    batch = images()
    data = {"x": batch["image"].reshape(len(batch["label"]), -1), "y": batch["label"]}

    def loss_fn(params, data):
        logits = data["x"] @ params["w"] + params["b"]
        loss = jaxopt.loss.multiclass_logistic_loss
        decay = 0.5 * 1e-3 * jaxopt.tree_util.tree_l2_norm(params, squared=True)
        return jnp.mean(jax.vmap(loss)(data["y"], logits)) + decay

    solver = jaxopt.OptaxSolver(loss_fn, optax.sgd(0.1, momentum=0.9), jit=False)
    params = {"w": jnp.zeros((64, 4)), "b": jnp.zeros(4)}

    def step(state, data):
        params, opt_state = solver.update(*state, data)
        return (params, opt_state), {"error": opt_state.error, "value": opt_state.value}

    return step, (params, solver.init_state(params, data)), data


def deep_equilibrium():
    """A fixed point per example, found by iteration and differentiated implicitly."""
    batch = points()
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": 0.2 * jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "out": jax.random.normal(keys[1], (WIDTH,)),
    }
    transform = optax.adam(1e-2, eps=1e-3)
    solver: Any = optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6)

    def predict(params, x):
        solved: Any = optimistix.fixed_point(
            lambda z, args: jnp.tanh(args[0] @ z + args[1]),
            solver,
            jnp.zeros(WIDTH),
            args=(params["w"], x),
            max_steps=64,
        )
        return solved.value @ params["out"]

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            predicted = jax.vmap(predict, in_axes=(None, 0))(params, batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def linear_solve_layer():
    """A small positive definite system solved for each example."""
    batch = points()
    params = {"w": 0.3 * jax.random.normal(jax.random.key(0), (WIDTH, 4, 4)), "out": jnp.ones(4)}
    transform = optax.adam(1e-2, eps=1e-3)

    def predict(params, x):
        root = jnp.einsum("d,dij->ij", x, params["w"])
        matrix = root @ root.T + jnp.eye(4)
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, x[:4], lineax.Cholesky()).value @ params["out"]

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            predicted = jax.vmap(predict, in_axes=(None, 0))(params, batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (eqx.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def named_axes():
    """penzai: a multilayer perceptron over named axes, parameters as a tree of its own."""
    batch = points()
    model = pz.nn.Sequential(
        [
            pz.nn.Linear.from_config("up", jax.random.key(0), {"in": WIDTH}, {"mid": 8}),
            pz.nn.Elementwise(jax.nn.gelu),
            pz.nn.Linear.from_config("down", jax.random.key(1), {"mid": 8}, {"out": 1}),
        ]
    )
    model, params = pz.unbind_params(model, freeze=True)
    transform = optax.adam(1e-2, eps=1e-3)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            x = pz.nx.wrap(batch["x"], "batch", "in")
            y = pz.bind_variables(model, params)(x).unwrap("batch", "out")[:, 0]
            return jnp.mean((y - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch


def langevin_dynamics():
    """Stochastic gradients of a posterior: a scaled sum over the batch and the prior's term."""
    batch = points()

    def log_prior(params):
        return -0.5 * sum(jnp.sum(p**2) for p in params)

    def log_likelihood(params, example):
        weight, bias = params
        return -0.5 * (example["x"] @ weight + bias - example["y"]) ** 2

    gradient = blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, 100)
    sampler = blackjax.sgld(gradient)

    def step(state, batch):
        params, key = state
        key, own = jax.random.split(key)
        return (sampler.step(own, params, batch, 1e-4), key), {}

    params = (jnp.zeros(WIDTH), jnp.float32(0.0))
    return step, (params, jax.random.key(0)), batch
