"""Training steps in the idiom of distrax's examples: reparametrised samples and flows."""

from __future__ import annotations

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from library_programs.batches import EXAMPLES, images, points


def variational_autoencoder():
    """An evidence lower bound with a sample for each example, a Bernoulli likelihood."""
    batch = (images()["image"].reshape(EXAMPLES, -1) > 0.5).astype(jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"hidden": (64, 8), "encoded": (8, 4), "back": (2, 8), "out": (8, 64)}
    params = {
        name: jax.random.normal(key, size) / np.sqrt(size[0])
        for (name, size), key in zip(sizes.items(), keys, strict=True)
    }
    transform = optax.adam(1e-2, eps=1e-3)

    def loss_fn(params, key, batch):
        mean, log_std = jnp.split(jax.nn.relu(batch @ params["hidden"]) @ params["encoded"], 2, -1)
        posterior = distrax.MultivariateNormalDiag(mean, jnp.exp(log_std))
        prior = distrax.MultivariateNormalDiag(jnp.zeros(2), jnp.ones(2))
        z = posterior.sample(seed=key)
        likelihood = distrax.Independent(
            distrax.Bernoulli(logits=jax.nn.relu(z @ params["back"]) @ params["out"]), 1
        )
        elbo = likelihood.log_prob(batch) - posterior.kl_divergence(prior)
        return -jnp.mean(elbo)

    def step(state, batch):
        params, opt_state, key = state
        key, own = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, own, batch)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    return step, (params, transform.init(params), jax.random.key(1)), batch


def normalising_flow():
    """Masked couplings of affine transformations, trained by maximum likelihood."""
    batch = points(4)["x"]
    keys = jax.random.split(jax.random.key(0), 4)
    params = [
        {"w": 0.3 * jax.random.normal(a, (4, 8)), "v": 0.3 * jax.random.normal(b, (8, 8))}
        for a, b in zip(keys[::2], keys[1::2], strict=True)
    ]
    transform = optax.adam(1e-2, eps=1e-3)

    def flow(params):
        layers, mask = [], jnp.arange(4) % 2 == 0
        for layer in params:

            def conditioner(x, layer=layer):
                return (jnp.tanh(x @ layer["w"]) @ layer["v"]).reshape(*x.shape, 2)

            def bijector(shift_scale):
                shift, log_scale = jnp.split(shift_scale, 2, axis=-1)
                return distrax.ScalarAffine(
                    shift=shift[..., 0], log_scale=jnp.tanh(log_scale[..., 0])
                )

            layers.append(distrax.MaskedCoupling(mask, conditioner, bijector))
            mask = ~mask
        base = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: -jnp.mean(flow(p).log_prob(batch)))(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch
