"""A training step in the idiom of e3nn-jax: equivariant networks, vmapped over shapes."""

from __future__ import annotations

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from library_programs.batches import EXAMPLES


class Equivariant(nn.Module):
    """Spherical harmonics of the edges, a tensor product, a sum over neighbours."""

    @nn.compact
    def __call__(self, positions):
        vectors = positions[:, None] - positions[None]
        vectors = e3nn.IrrepsArray("1o", vectors)
        harmonics = e3nn.spherical_harmonics([0, 1], vectors, normalize=True)
        features = e3nn.flax.Linear("4x0e + 2x1o")(harmonics)
        messages = e3nn.tensor_product(features, harmonics, filter_ir_out=["0e", "1o"])
        nodes = e3nn.sum(e3nn.flax.Linear("4x0e + 2x1o")(messages), axis=1) / 3.0
        nodes = e3nn.gate(e3nn.flax.Linear("6x0e + 2x1o")(nodes))
        return e3nn.sum(e3nn.flax.Linear("4x0e")(nodes), axis=0).array


def equivariant_shapes():
    """Shapes of four points, told apart whatever their rotation."""
    draw = np.random.default_rng(0)
    batch = {
        "positions": jnp.asarray(draw.normal(size=(EXAMPLES, 4, 3)).astype("float32")),
        "label": jnp.asarray(draw.integers(0, 4, EXAMPLES)),
    }
    model = Equivariant()
    params = model.init(jax.random.key(0), batch["positions"][0])
    transform = optax.adam(1e-2, eps=1e-3)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            logits = jax.vmap(lambda p: model.apply(params, p))(batch["positions"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, transform.init(params)), batch
