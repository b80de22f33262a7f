"""Training steps in the idiom of diffrax's examples: differential equations, solved per example."""

from __future__ import annotations

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from library_programs.batches import EXAMPLES


class Field(eqx.Module):
    """A vector field given by a small network."""

    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


def _curves():
    draw = np.random.default_rng(0)
    times = jnp.linspace(0.0, 1.0, 5)
    start = jnp.asarray(draw.normal(size=(EXAMPLES, 1, 2)).astype("float32"))
    return times, start * jnp.exp(-times)[:, None]


def _trained(field, solve):
    transform = optax.adam(1e-2, eps=1e-3)
    params, static = eqx.partition(field, eqx.is_inexact_array)

    def step(state, curves):
        params, opt_state = state

        def loss_fn(params):
            predicted = jax.vmap(lambda y: solve(eqx.combine(params, static), y[0]))(curves)
            return jnp.mean((curves - predicted) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params))


def neural_differential_equation():
    """Adaptive steps: a while loop in which every example takes as many as it needs."""
    times, curves = _curves()
    field = Field(eqx.nn.MLP(2, 2, 8, 1, jax.nn.softplus, key=jax.random.key(0)))

    def solve(field, start):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=times[0],
            t1=times[-1],
            dt0=times[1] - times[0],
            y0=start,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=times),
            max_steps=64,
        ).ys

    return *_trained(field, solve), curves


def backsolved_equation():
    """Constant steps, gradients by the equation solved backwards in time."""
    times, curves = _curves()
    field = Field(eqx.nn.MLP(2, 2, 8, 1, jnp.tanh, key=jax.random.key(0)))

    def solve(field, start):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=0.25,
            y0=start,
            saveat=diffrax.SaveAt(ts=times),
            adjoint=diffrax.BacksolveAdjoint(),
        ).ys

    return *_trained(field, solve), curves
